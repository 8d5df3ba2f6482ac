"""Verdicts: what they refuse, what they show, and how often they are wrong."""

from pathlib import Path

import numpy as np
import pytest
from changes import groups_of, replace, slowed

from tprimat.analyze.compare import comparable, verdict
from tprimat.analyze.groups import group_estimate, group_runs, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.traits import ranks
from tprimat.core.models import model_shape
from tprimat.records.discover import load_results
from tprimat.report.words import evidence_words, not_counted_words

RUNS = Path(__file__).parent.parent / "runs"


def recorded(folder, part=""):
    return [result for result in load_results([RUNS / folder])[0] if part in result.run.run_id]


def changed(result, **fields):
    return replace(result, run=replace(result.run, **fields))


def other(result, factor, run_id):
    return slowed(result, factor, run_id=run_id, strategy="other")


def test_of_many_options_a_label_names_those_that_tell_the_runs_apart():
    (result,) = recorded("h100", "llama-0")
    given = {"fused_adam": True, "load_ahead": True}
    changes = ({}, {"fused_adam": False}, {"layers": "local"})
    runs = [changed(result, engine_options=given | change) for change in changes]
    machine = "llama H100 SXM"
    assert [group.label for group in groups_of(*runs)] == [machine, f"{machine} fused_adam=False", f"{machine} layers=local"]
    assert [group.label for group in groups_of(*runs[:2])] == [f"{machine} fused_adam=True", f"{machine} fused_adam=False"]
    silent = groups_of(changed(result, engine_options={}), runs[0])
    assert [group.label for group in silent] == [f"{machine} options unknown", f"{machine} fused_adam=True and 1 more"]


def test_runs_that_say_nothing_of_what_they_are_are_nobodys_repetitions():
    results, _ = load_results([RUNS.parents[1] / "benchmarks" / "records" / "h200" / "qwen3-8b"])
    silent = [changed(result, engine_options={}, matmul_dtype=None) for result in results if result.run.engine == "torchtune"]
    groups = groups_of(*silent)
    assert [len(group.runs) for group in groups] == [1, 1, 1]
    assert [group.label for group in groups if "torchtune-lora-bf16/" in group.label]
    assert {group.runs[0].metrics.model_flops_per_second_per_gpu for group in groups} == {None}
    assert verdict(*groups[:2]).outcome == "refused"


@pytest.mark.parametrize(("platform", "gpus", "words"), [("cuda", 1, "1 GPU"), ("cuda", 8, "8 GPUs"), ("cpu", 8, "8 processes")])
def test_one_rank_is_no_plural(platform, gpus, words):
    run = recorded("h100", "llama-0")[0].run
    machine = replace(run.machine, platform=platform, gpus_per_node=gpus, nodes=1)
    assert ranks(replace(run, machine=machine)) == words


def test_a_run_that_failed_or_ran_something_else_is_not_counted():
    oom = measure(recorded("h100", "oom")[0], MetricOptions())
    (whole, *_) = recorded("h100", "llama-0")
    open_end = measure(changed(whole, outcome="running"), MetricOptions())
    steps = f"steps so far: {len(whole.steps)}"
    assert not_counted_words(open_end) == f"no end was recorded: it is still running, or was killed with its launcher; {steps}"
    assert (oom.metrics, not_counted_words(oom)) == (None, "out of memory: CUDA out of memory on rank 3")
    other = measure(changed(recorded("h100", "llama-0")[0], mismatches=("TP 4 asked, 1 ran",)), MetricOptions())
    assert "TP 4 asked, 1 ran" in not_counted_words(other)
    assert group_runs([oom, other]) == []


@pytest.mark.parametrize(
    ("first", "second", "refused"), [("natural", "balanced", True), ("natural", "natural", False), (None, None, True)]
)
def test_routing_must_be_known_and_equal_where_there_are_experts(first, second, refused):
    one = recorded("h100", "llama-0")[0].run
    shape = model_shape("mixtral-8x7b")
    runs = [replace(one, shape=shape, model="mixtral", routing=routing) for routing in (first, second)]
    assert [difference.name for difference in comparable(*runs)] == ["routing"] * refused


def test_a_faster_machine_is_shown_with_its_ratio():
    h100, mi300x = groups_of(*recorded("h100", "llama-0"), *recorded("h100", "llama-1"), *recorded("mi300x"))
    judged = verdict(h100, mi300x)
    assert judged.outcome == "these runs differ"
    assert judged.ratio.low < judged.ratio.value < judged.ratio.high
    assert judged.ratio.value == pytest.approx(4.43 / 3.95, rel=0.01)
    assert evidence_words(judged) == "3 and 2 runs: fewer than 3 per side"


def test_a_run_against_itself_shows_no_difference_and_says_how_little_one_run_proves():
    (run,) = recorded("h100", "llama-0")
    again = other(run, 1.0, "again")
    judged = verdict(*groups_of(run, again))
    assert (judged.outcome, judged.ratio.value) == ("no difference shown", 1.0)
    assert evidence_words(judged).startswith("one run each: fewer than 3 per side, and single runs are assumed to vary by ")


def test_single_runs_of_a_mixture_are_taken_to_differ_as_mixtures_do():
    (run,) = recorded("h100", "llama-0")
    dense = [run, other(run, 1.1, "slower")]
    mixture = [changed(one, shape=model_shape("mixtral-8x7b"), routing="natural") for one in dense]
    judged = verdict(*groups_of(*mixture))
    assert verdict(*groups_of(*dense)).outcome == "these runs differ"
    assert judged.outcome == "no difference shown"
    assert judged.assumed_spread == 0.07 > verdict(*groups_of(*dense)).assumed_spread > 0.004


def test_only_three_runs_a_side_show_one_configuration_to_be_faster():
    runs = recorded("mi300x")
    slow = [other(run, 1.02, f"slow-{number}") for number, run in enumerate(runs)]
    assert len(runs) == 3
    assert verdict(*groups_of(*slow, *runs)).outcome == "faster"
    assert verdict(*groups_of(*slow[:2], *runs[:2])).outcome == "these runs differ"


def test_a_gate_opens_only_where_the_whole_interval_is_within_the_margin():
    (run,) = recorded("h100", "llama-0")
    judged = verdict(*groups_of(run, other(run, 1.05, "slow")))
    assert [judged.no_slower_than(margin) for margin in (0.01, 0.05, 0.08)] == [False, None, True]


def test_a_group_of_runs_has_the_spread_between_them():
    (group,) = groups_of(*recorded("mi300x"))
    estimate = group_estimate(group, lambda metrics: metrics.tokens_per_second_per_gpu)
    values = [item.metrics.tokens_per_second_per_gpu.value for item in group.runs]
    assert estimate.samples == 3
    assert estimate.value == pytest.approx(np.exp(np.mean(np.log(values))))
    assert np.log(estimate.high / estimate.value) == pytest.approx(4.302653 * np.std(np.log(values), ddof=1) / np.sqrt(3))
