"""Series over numbers of GPUs."""

from pathlib import Path

import numpy as np
import pytest
from changes import groups_of
from runs.make_runs import a_run

from tprimat.analyze.compare import Question, verdict
from tprimat.analyze.scaling import Point, Series, serial_share, series_of
from tprimat.core.models import model_shape
from tprimat.records.benchmark_file import RunResult
from tprimat.records.schema import Estimate, Machine, StepRecord


def point(gpus, rate, tokens=1.0):
    return Point(gpus=gpus, nodes=1, tokens_per_second=Estimate(value=rate, low=None, high=None, samples=1), tokens=tokens)


def a_series(rates, counts):
    points = tuple(point(n, rate, 100.0 * n) for n, rate in zip(counts, rates, strict=True))
    return Series(name="a", kind="weak", points=points)


def run(gpus, batch, seconds, **changes):
    machine = Machine(platform="cuda", accelerator="an accelerator without a known peak", gpus_per_node=gpus, nodes=1)
    name = f"{gpus}-{batch}-{changes.get('tensor_parallel', 1)}"
    given = {"machine": machine, "data_parallel": gpus, "global_batch_sequences": batch, "evidence": None, "started_at": None}
    record = a_run(changes.pop("run_id", name), **{**given, **changes})
    steps = tuple(StepRecord(step=i, step_seconds=seconds, tokens=batch * 2048) for i in range(1, 12))
    return RunResult(run=record, steps=steps, path=Path("run.json"))


def series_in(*runs):
    return series_of(groups_of(*runs))


def test_multiplier_and_efficiency_count_from_the_smallest_even_if_it_is_not_one_gpu():
    rows = a_series([4000, 7200], (4, 8)).rows
    assert [(row.multiplier.value, row.efficiency.value) for row in rows] == [(1, 1), (pytest.approx(1.8), pytest.approx(0.9))]


def test_runs_whose_work_grows_but_not_with_the_gpus_are_no_series():
    assert series_in(run(1, 16, 1.0), run(2, 16, 0.9), run(4, 48, 1.1))[0].kind == "strong"
    assert series_in(run(1, 16, 1.0), run(4, 48, 1.1)) == []


def test_runs_of_both_kinds_make_a_weak_and_a_strong_series():
    lines = series_in(run(1, 16, 1.0), run(2, 16, 0.55), run(4, 16, 0.3), run(2, 32, 1.05), run(4, 64, 1.1))
    assert sorted((made.kind, tuple(p.gpus for p in made.points)) for made in lines) == [
        ("strong", (1, 2, 4)),
        ("weak", (1, 2, 4)),
    ]
    strong = next(made for made in lines if made.kind == "strong")
    assert [row.multiplier.value for row in strong.rows] == pytest.approx([1, 1 / 0.55, 1 / 0.3])
    assert strong.points[0].tokens == pytest.approx(10 * 16 * 2048)
    assert strong.points[0].seconds == pytest.approx(10.0)


@pytest.mark.parametrize("runs", [1, 3])
def test_efficiency_has_the_interval_of_a_verdict_on_the_same_runs(runs):
    rng = np.random.default_rng(5)
    results = [
        run(gpus, 16 * gpus, 1 + gpus / 50 + rng.normal() / 100, run_id=f"{gpus}-{number}")
        for gpus in (1, 4)
        for number in range(runs)
    ]
    groups = groups_of(*results)
    ratio = verdict(*groups, Question(even_if_different=True)).ratio
    first, last = series_of(groups)[0].rows
    assert (last.efficiency.value, last.efficiency.low, last.efficiency.high) == pytest.approx(
        (ratio.value, ratio.low, ratio.high)
    )
    assert last.multiplier.low == pytest.approx(4 * ratio.low)
    assert last.multiplier.high == pytest.approx(4 * ratio.high)
    assert ratio.low < ratio.value < ratio.high
    assert (first.efficiency.low, first.multiplier.high) == (None, None), "it is relative to itself"


def test_layouts_are_not_mixed_while_one_of_them_scales():
    lines = series_in(run(1, 16, 1.0), run(2, 32, 1.05), run(2, 32, 0.9, tensor_parallel=2, data_parallel=1))
    assert [[p.layout for p in made.points] for made in lines] == [["TP1 PP1 DP1", "TP1 PP1 DP2"]]


@pytest.mark.parametrize("option", ["optimizer_states", "expert_capacity"])
def test_what_forbids_a_comparison_forbids_a_series(option):
    """Moments in bf16 move fewer bytes than in fp32, and dropped tokens are not computed: that is no gain of more GPUs."""
    changes = {"optimizer_states": {"optimizer_states": "bf16"}, "expert_capacity": {"expert_capacity": 1.25}}
    shape = {"shape": model_shape("qwen3-30b-a3b"), "routing": "balanced"}
    usual = {"optimizer_states": "fp32", **shape}
    assert len(series_in(run(1, 16, 1.0, **usual), run(2, 32, 1.05, **usual))) == 1
    assert series_in(run(1, 16, 1.0, **usual), run(2, 32, 1.05, **{**usual, **changes[option]})) == []


def test_points_made_by_amdahls_law_give_back_its_share_with_an_interval_that_holds_it_from_three_on():
    rates = [1000 * n / (1 + 0.03 * (n - 1)) * by for n, by in zip((1, 2, 4, 8), (1.002, 0.999, 1.001, 0.998), strict=True)]
    share = serial_share(a_series(rates, (1, 2, 4, 8)))
    assert share.low < 0.03 < share.high < 0.035
    assert serial_share(a_series([1000, 1900], (1, 2))).value == pytest.approx(1 / 19)
