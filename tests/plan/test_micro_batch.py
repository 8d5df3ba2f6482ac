"""The search for the largest micro-batch, against machines whose memory is known."""

import itertools

import pytest

from tprimat.core.models import model_shape
from tprimat.core.workload import FullWorkload, Layout
from tprimat.plan.micro_batch import (
    as_asked,
    candidates,
    largest_that_fits,
    next_candidate,
    searched,
    trial_micro_batches,
    with_micro_batch,
)
from tprimat.records.schema import MicroBatchTrial

SIZES = (1, 2, 4, 8, 16, 32)


def search(peak_of, limit, capacity=None, sizes=SIZES):
    """Drive the search as launcher and ranks do: above `capacity` there is no peak to read, the process is gone."""
    trials = []
    while (size := next_candidate(sizes, trials)) is not None:
        assert len(trials) < 20, "the search does not end"
        peak = peak_of(size)
        gone = capacity is not None and peak > capacity
        trials.append(
            MicroBatchTrial(micro_batch_sequences=size, peak_bytes=None if gone else peak, limit_bytes=None if gone else limit)
        )
    return trials


@pytest.mark.parametrize(("base", "slope", "limit"), list(itertools.product((0, 50, 90), (1, 3, 7, 20), (60, 100, 140, 1000))))
def test_where_memory_is_a_line_the_largest_is_found_and_none_above_is_tried_but_the_first_two(base, slope, limit):
    trials = search(lambda size: base + slope * size, limit)
    fitting = [size for size in SIZES if base + slope * size <= limit]
    assert largest_that_fits(trials) == max(fitting, default=None)
    tried = [trial.micro_batch_sequences for trial in trials]
    assert all(size in fitting or size in SIZES[:2] for size in tried)
    assert len(tried) <= 3


@pytest.mark.parametrize("limit", [20, 33, 70, 129, 300])
def test_where_a_constant_peak_hides_the_slope_processes_run_out_of_memory_and_the_answer_is_still_right(limit):
    trials = search(lambda size: max(20, 4 * size), limit, capacity=limit)
    assert largest_that_fits(trials) == max(size for size in SIZES if max(20, 4 * size) <= limit)


def test_where_memory_grows_faster_than_a_line_no_size_is_tried_twice():
    trials = search(lambda size: size**2, 300, capacity=300)
    tried = [trial.micro_batch_sequences for trial in trials]
    assert largest_that_fits(trials) == 16
    assert len(tried) == len(set(tried))


def test_where_not_even_the_smallest_fits_nothing_larger_is_tried():
    assert [trial.micro_batch_sequences for trial in search(lambda size: 100 + size, 50)] == [1]
    assert [trial.micro_batch_sequences for trial in search(lambda size: 100 + size, 50, capacity=60)] == [1]


def test_a_batch_with_one_size_needs_one_trial():
    assert [trial.micro_batch_sequences for trial in search(lambda size: size, 50, sizes=(1,))] == [1]


def work(layout, whole):
    shape = model_shape("llama-3.1-8b")
    return FullWorkload(**layout.facts, shape=shape, global_batch_sequences=whole, sequence_tokens=8)


def test_sizes_divide_each_replicas_share_and_give_the_interleaved_schedule_whole_rounds():
    assert candidates(work(Layout(data=4), 48)) == (1, 2, 3, 4, 6, 12)
    assert candidates(work(Layout(data=2, pipeline=4, virtual_pipeline=2), 32)) == (1, 2, 4)


def test_a_trial_has_as_many_micro_batches_as_a_pipeline_holds_at_once():
    assert trial_micro_batches(Layout(data=4), 16) == 2
    assert trial_micro_batches(Layout(data=4), 1) == 1
    assert trial_micro_batches(Layout(pipeline=4, virtual_pipeline=2), 64) == 16


def test_the_record_tells_what_was_tried_and_what_larger_ones_would_take():
    trials = search(lambda size: 100 + 10 * size, 185)
    found = searched(SIZES, trials)
    assert [(trial.micro_batch_sequences, trial.peak_bytes) for trial in found.trials] == [(1, 110), (2, 120), (8, 180)]
    assert found.predicted_bytes == {16: 260, 32: 420}


def test_the_plan_of_the_run_has_the_number_and_can_be_compared_with_what_was_asked(tmp_path):
    from planning import make_plan

    plan = make_plan(tmp_path, "llama", {"training.data.micro_batch_size": "auto", "training.data.global_batch_size": 16})
    found = with_micro_batch(plan, searched((1, 2), search(lambda size: size, 9, sizes=(1, 2))), 2)
    assert (found.workload.micro_batch_sequences, found.workload.accumulation_steps) == (2, 1)
    assert as_asked(found) == plan
    assert as_asked(plan) is plan
