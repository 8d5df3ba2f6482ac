"""The steady window on step times of the kinds that real runs show."""

from dataclasses import replace

import numpy as np
import pytest

from tprimat.analyze.window import steady_steps, steady_window
from tprimat.core.errors import MetricError
from tprimat.records.schema import StepRecord
from tprimat.report.words import rule_words


def steps_of(seconds, first=1):
    return [StepRecord(step=i, step_seconds=float(value), tokens=1000) for i, value in enumerate(seconds, first)]


def steady(n, seed=0, level=3.2, noise=0.01):
    return level * (1 + noise * np.random.default_rng(seed).normal(size=n))


@pytest.mark.parametrize("slow", range(2, 9))
def test_a_slow_stretch_only_six_percent_above_is_found(slow):
    seconds = np.concatenate((np.full(slow, 3.2 * 1.06), steady(50 - slow)))
    assert steady_window(steps_of(seconds)).first_step == slow + 1


def test_without_a_slow_stretch_only_step_1_is_left_out():
    starts = [steady_window(steps_of(steady(50, seed))).first_step for seed in range(400)]
    assert min(starts) == 2
    assert sum(start == 2 for start in starts) / 400 > 0.93


def test_a_late_spike_stays_in_the_window_and_is_counted():
    seconds = steady(50)
    seconds[19] = 60.0
    window = steady_window(steps_of(seconds))
    assert (window.first_step, window.outliers) == (2, 1)


def test_a_fast_step_inside_the_slow_stretch_does_not_end_it():
    seconds = np.concatenate(([30, 25, 20, 3.2, 18, 16, 16], steady(43)))
    assert steady_window(steps_of(seconds)).first_step == 8


def test_a_log_that_starts_at_step_10_keeps_its_first_line():
    window = steady_window(steps_of(steady(20), first=10))
    assert window.first_step == 10


def test_step_times_that_creep_up_are_reported_as_drift():
    seconds = 2.0 * (1 + 0.002 * np.arange(60))
    assert steady_window(steps_of(seconds)).drift_per_step == pytest.approx(0.002, rel=0.1)


@pytest.mark.parametrize(
    ("seconds", "warmup", "text"),
    [
        ([], "auto", "No step was measured"),
        ([3.0], "auto", "No steady step"),
        ([3.0, 3.0], 7, "No steady step"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(seconds, warmup, text):
    with pytest.raises(MetricError, match=text):
        steady_window(steps_of(seconds), warmup)


def test_profiled_steps_are_left_out_before_the_slow_start_is_looked_for():
    seconds = np.concatenate(([40.0], np.full(7, 9.0), steady(42)))
    window = steady_window(steps_of(seconds), profiled=tuple(range(2, 9)))
    assert (window.first_step, window.last_step, window.steps, window.left_out) == (9, 50, 42, ())
    assert window.rule == {"start-up": "1", "profiled": "2-8"}
    assert rule_words(window) == "excluded step 1: start-up; steps 2-8: profiled"
    assert rule_words(replace(window, rule="excluded step 1: start-up")) == "excluded step 1: start-up"  # of an older file


def test_profiled_steps_between_steady_ones_do_not_count():
    seconds = [2.0] * 12
    seconds[5] = seconds[6] = seconds[9] = 7.0
    steps = steps_of(seconds)
    window = steady_window(steps, 0, profiled=(6, 7, 10))
    assert (window.first_step, window.last_step, window.steps, window.left_out) == (1, 12, 9, (6, 7, 10))
    assert window.outliers == 0
    assert window.rule["profiled"] == "6-7, 10"
    assert {step.step_seconds for step in steady_steps(steps, window)} == {2.0}


def test_a_run_of_which_every_step_was_profiled_has_no_speed():
    with pytest.raises(MetricError, match="No steady step is left: 3 measured, 0 of them warm-up, 3 profiled") as caught:
        steady_window(steps_of([5.0, 3.0, 3.0]), profiled=(1, 2, 3))
    assert caught.value.fix == "run more steps, or leave out fewer (warm-up 0 keeps all; profiling off)"
