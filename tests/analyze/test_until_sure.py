"""Repeating until sure: in which order, when it ends, and how seldom it ends with a difference that is not there."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tprimat.analyze.compare import Question, verdict
from tprimat.analyze.groups import group_runs, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.core.errors import ConfigError, LaunchError
from tprimat.core.statistics import rate_of, ratio_of_rates
from tprimat.records.discover import read_result
from tprimat.report.comparison import Comparison
from tprimat.runner.session import RunRequest, prepare
from tprimat.runner.until_sure import confidence_of, in_turn, looks_between, question_when_sure, repeat, session_of

LLAMA = read_result(Path(__file__).parents[1] / "runs" / "h100" / "runs" / "h100-llama-0")


@pytest.mark.parametrize(
    ("runs", "most", "looks"), [(1, 3, [1, 3]), (1, 6, [1, 3, 5, 6]), (2, 4, [2, 3, 4]), (3, 8, [3, 5, 7, 8]), (8, 8, [8])]
)
def test_looks_come_after_three_runs_and_then_after_each_block(runs, most, looks):
    assert looks_between(runs, most) == looks


def test_runs_alternate_a_b_b_a_and_the_side_with_fewer_catches_up():
    assert in_turn([2, 2]) == [[0, 1], [1, 0]]
    assert in_turn([3, 1]) == [[0, 1], [0], [0]]
    assert in_turn([2, 2, 2]) == [[0, 1, 2], [2, 1, 0]]
    assert in_turn([]) == []


@pytest.mark.parametrize("between", [0.002, 0.01])
def test_equal_configurations_are_called_different_in_one_of_twenty_series_at_most(between):
    rng = np.random.default_rng(11)
    looks = looks_between(2, 9)
    confidence, wrong = confidence_of(looks), 0
    for _ in range(1000):
        sides = [[rate_of(np.ones(10), math.exp(between * rng.normal()) * np.ones(10)) for _ in range(9)] for _ in range(2)]
        ratios = (ratio_of_rates(sides[0][:runs], sides[1][:runs], confidence) for runs in looks if runs >= 3)
        wrong += any(not ratio.low <= 1 <= ratio.high for ratio in ratios)
    assert wrong <= 0.06 * 1000


ONE_LOOK = Question(confidence=0.98)


class Bench:
    """A machine on which two strategies run at set speeds; what is injected is only the time that steps take."""

    def __init__(self, speeds, spread=0.002):
        self.rng, self.speeds, self.spread, self.results, self.order = np.random.default_rng(5), speeds, spread, [], []

    def run(self, strategy):
        factor = math.exp(self.spread * self.rng.normal()) / self.speeds[strategy]
        steps = tuple(
            replace(step, step_seconds=step.step_seconds * factor, ended_at_seconds=step.ended_at_seconds * factor)
            for step in LLAMA.steps
        )
        self.order.append(strategy)
        run = replace(LLAMA.run, run_id=f"{strategy}-{len(self.results)}", strategy=strategy)
        self.results.append(replace(LLAMA, run=run, steps=steps))

    def start(self, groups):
        for group in groups:
            self.run(group.run.strategy)

    def read(self, question=ONE_LOOK):
        groups = group_runs([measure(result, MetricOptions()) for result in self.results])
        first, *rest = groups
        return Comparison(groups=tuple(groups), verdicts=tuple(verdict(first, other, question) for other in rest))


def decided(found):
    return found.outcome in {"faster", "slower"}


def test_a_clear_difference_ends_after_three_runs_a_side_in_turn():
    bench = Bench({"a": 1.0, "b": 1.05})
    for name in ("a", "b"):
        bench.run(name)
    found = repeat(bench.read, bench.start, decided, most=9)
    assert (found.verdicts[0].outcome, bench.order) == ("faster", ["a", "b", "a", "b", "b", "a"])


def test_no_difference_ends_with_all_runs():
    bench = Bench({"a": 1.0, "b": 1.0})
    for name in ("a", "b"):
        bench.run(name)
    found = repeat(bench.read, bench.start, decided, most=5)
    assert found.verdicts[0].outcome == "no difference shown"
    assert [len(group.runs) for group in found.groups] == [5, 5]


def test_a_repetition_that_is_another_configuration_is_refused():
    bench = Bench({"a": 1.0, "b": 1.0})
    for name in ("a", "b"):
        bench.run(name)

    def start_with_other_versions(groups):
        bench.start(groups)
        bench.results = [
            replace(result, run=replace(result.run, software={"torch": "2.99"})) if number > 1 else result
            for number, result in enumerate(bench.results)
        ]

    with pytest.raises(LaunchError, match="does not belong to it") as caught:
        repeat(bench.read, start_with_other_versions, decided, most=5)
    assert "torch 2.99" in str(caught.value)


def test_fewer_than_three_runs_are_refused_and_runs_without_a_plan_cannot_be_repeated():
    bench = Bench({"a": 1.0, "b": 1.0})
    for name in ("a", "b"):
        bench.run(name)
    with pytest.raises(ConfigError, match="--until-sure is 2"):
        question_when_sure(bench.read, Question(), 2, None)
    with pytest.raises(LaunchError, match="No plan of"):
        question_when_sure(bench.read, Question(), 3, None)


def test_a_run_of_several_nodes_is_not_repeated_on_one(tmp_path):
    bench = Bench({"a": 1.0})
    bench.run("a")
    (group,) = bench.read(Question()).groups
    asked = RunRequest(model="llama", platform="cpu", gpus=1, nodes=2, dry_run=True, output=tmp_path)
    with pytest.raises(LaunchError, match="ran on 2 nodes, and only one is here"):
        session_of(prepare(asked).plans[0], group, tmp_path)


def test_a_run_is_not_repeated_under_other_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    bench = Bench({"a": 1.0})
    bench.run("a")
    (group,) = bench.read(Question()).groups
    first = group.runs[0]
    run = replace(first.result.run, environment={"OMP_NUM_THREADS": "1"})
    group = replace(group, runs=(replace(first, result=replace(first.result, run=run)),))
    asked = RunRequest(model="llama", platform="cpu", gpus=1, dry_run=True, output=tmp_path)
    with pytest.raises(LaunchError, match="ran with other environment variables: NCCL_ALGO not set there, Ring here"):
        session_of(prepare(asked).plans[0], group, tmp_path)
