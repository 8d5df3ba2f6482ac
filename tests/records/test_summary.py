"""Steps of long runs are merged as they arrive: sums stay, memory does not grow, and short runs stay as they are."""

import itertools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tprimat.analyze.window import steady_window
from tprimat.logs.failures import ended_early
from tprimat.records import summary
from tprimat.records.schema import StepRecord
from tprimat.records.store import RunDirectory, to_json
from tprimat.records.summary import MOST_STEPS, StepSummary, summarised


def a_step(number, seconds=0.5, **fields):
    return StepRecord(**{"step": number, "step_seconds": seconds, "tokens": 100, "loss": 1.0, **fields})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=200), st.integers(3, 30))
def test_sums_numbers_and_the_worst_memory_survive(times, most):
    steps = [a_step(number, seconds, peak_allocated_bytes=number * 7 % 50) for number, seconds in enumerate(times, start=1)]
    before, summary.MOST_STEPS = summary.MOST_STEPS, most
    try:
        found = summarised(steps)
    finally:
        summary.MOST_STEPS = before
    assert len(found) <= most + 1
    assert sum(step.merged for step in found) == len(steps)
    assert sum(step.step_seconds * step.merged for step in found) == pytest.approx(sum(times))
    assert [step.step for step in found] == list(itertools.accumulate(step.merged for step in found))
    assert max(step.peak_allocated_bytes for step in found) == max(step.peak_allocated_bytes for step in steps)
    assert found[0] == steps[0], "the start-up stays by itself"
    assert len({step.merged for step in found[1:-1]}) <= 1, "means of equally many steps"


def test_a_run_of_the_usual_length_is_not_touched():
    steps = tuple(a_step(number) for number in range(1, MOST_STEPS + 1))
    assert summarised(steps) == steps


def test_memory_does_not_grow_with_the_number_of_steps(monkeypatch):
    most = 1000
    monkeypatch.setattr(summary, "MOST_STEPS", most)
    one = a_step(1)

    def peak_of(count):
        tracemalloc.start()
        found = StepSummary()
        for _ in range(count):
            found.add(one)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_of(8 * most) < 2 * peak_of(2 * most)


def test_a_long_record_is_read_merged_and_its_throughput_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "MOST_STEPS", 100)
    directory = RunDirectory(tmp_path)
    steps = [a_step(1, 9.0), *(a_step(number, 0.5 + number % 5 / 100) for number in range(2, 1001))]
    directory.steps_file.write_text("".join(to_json(step) + "\n" for step in steps))
    found = directory.read_steps()
    assert len(found) <= 101
    window = steady_window(found)
    assert (window.first_step > 1, window.last_step) == (True, 1000)
    steady = [step for step in found if step.step >= window.first_step]
    assert sum(s.step_seconds * s.merged for s in steady) / sum(s.merged for s in steady) == pytest.approx(0.52, rel=0.01)


def test_a_long_run_that_stops_early_is_not_taken_for_complete():
    steps = summarised(a_step(number) for number in range(1, 3 * MOST_STEPS))
    assert steps[-2].merged > 1
    assert ended_early(steps, 3 * MOST_STEPS + 1) is not None
    assert ended_early(steps, 3 * MOST_STEPS - 1) is None
