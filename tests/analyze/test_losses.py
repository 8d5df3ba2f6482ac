"""The sequential test of losses: how often it is wrong, what it sees, and which runs are pairs."""

import math
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from changes import evidence as evidence_of
from changes import replace

from tprimat.analyze.losses import far_above, judge, mismatch, pairs_of
from tprimat.records.discover import read_result

LLAMA = Path(__file__).parents[1] / "runs" / "h100" / "runs" / "h100-llama-0"
MARGIN = 0.01
CASES = 600


def series(rng, steps, rho):
    """AR(1) noise of unit spread."""
    first, *noise = rng.normal(size=steps).tolist()
    return np.array(list(accumulate(noise, lambda before, value: rho * before + math.sqrt(1 - rho**2) * value, initial=first)))


def pairs_with(rng, difference, *, seeds, rho, steps=100, spread=0.005, between=0.003):
    """Losses whose true relative difference is known, with noise of each step and of each seed."""
    curves = {}
    for seed in range(seeds):
        reference = 2 + 8 * np.exp(-np.arange(steps) / 30)
        own = between * rng.normal() if seeds > 1 else 0.0
        candidate = reference * (1 + difference + own + spread * series(rng, steps, rho))
        curves[seed] = [tuple(dict(enumerate(map(float, curve), 1)) for curve in (reference, candidate))]
    return curves


@pytest.mark.parametrize(("seeds", "rho"), [(1, 0.0), (1, 0.5), (1, 0.8), (3, 0.5), (5, 0.5)])
def test_at_the_margin_neither_verdict_comes_in_more_than_one_of_twenty_cases(seeds, rho):
    """The hardest truth: a difference of just the margin, looked at five times."""
    rng = np.random.default_rng(7 * seeds + int(10 * rho))
    outcomes = [judge(pairs_with(rng, MARGIN, seeds=seeds, rho=rho), MARGIN).outcome for _ in range(CASES)]
    assert outcomes.count("different") <= 0.05 * CASES
    assert outcomes.count("same") <= 0.05 * CASES


@pytest.mark.parametrize("seeds", [1, 3])
def test_equal_losses_are_shown_to_be_equal_and_unlike_ones_are_refuted(seeds):
    rng = np.random.default_rng(3)
    outcomes = {
        difference: [judge(pairs_with(rng, difference, seeds=seeds, rho=0.3, between=0.0005), MARGIN).outcome for _ in range(100)]
        for difference in (0.0, -0.05)
    }
    assert outcomes[0.0].count("same") >= 85
    assert outcomes[-0.05].count("different") >= 95


def test_a_loss_that_is_not_a_number_refutes():
    curve = dict.fromkeys(range(1, 101), 2.0)
    assert judge({1: [(curve, curve | {14: float("nan")})]}, MARGIN).outcome == "different"


def three_pairs(rng, rise, *, steps, spread, rho, seeds):
    """Losses of three pairs, of one seed or of three, of which the last rises at 60 % of the steps."""
    curves = {}
    for number in range(3):
        curve = 6 + 4 * np.exp(-np.arange(steps) / 10)
        risen = np.where(np.arange(steps) < 0.6 * steps, 1.0, 1 + rise * (number == 2))
        sides = [curve * (1 + spread * series(rng, steps, rho)) for _ in range(2)]
        sides[1] *= risen * (1 + 0.01 * rng.normal())
        curves.setdefault(number % seeds, []).append(tuple(dict(enumerate(map(float, side), 1)) for side in sides))
    return curves


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize(("steps", "spread", "rho", "seen"), [(50, 0.03, 0.0, 0.9), (50, 0.03, 0.5, 0.8), (100, 0.05, 0.5, 0.75)])
def test_one_of_three_candidates_that_rises_by_12_percent_under_noise_is_seen(seeds, steps, spread, rho, seen):
    """Before, with the noise of each pair alone and a rise of 10 % at least by its bound, 1 to 42 % were seen."""
    rng, alarms, sights = np.random.default_rng(5), 0, 0
    for _ in range(CASES // 4):
        alarms += judge(three_pairs(rng, 0.0, steps=steps, spread=spread, rho=rho, seeds=seeds), 0.02).outcome == "different"
        sights += judge(three_pairs(rng, 0.12, steps=steps, spread=spread, rho=rho, seeds=seeds), 0.02).outcome == "different"
    assert alarms <= 0.02 * CASES / 4
    assert sights >= seen * CASES / 4


def test_a_single_step_decides_nothing():
    assert judge({1: [({1: 2.0}, {1: 2.0})]}, MARGIN).outcome == "undecided"


def falls(start, end, steps=20):
    return np.linspace(start, end, steps)


@pytest.mark.parametrize(
    ("reference", "other", "far"),
    [
        (falls(12.5, 6.5), falls(25, 24.8), True),
        (falls(12.5, 6.5), falls(12.5, 12.5), True),
        (falls(12.5, 6.5), np.where(np.arange(20) < 8, falls(12.5, 6.5), np.arange(20) % 2 * 23 + 7), True),
        (falls(12.5, 6.5), falls(12.5, 9.0), True),
        (falls(12.5, 6.5), falls(12.5, 7.2), False),
        (falls(12.5, 6.5), falls(12.5, 6.5) + 20 * (np.arange(20) == 17), False),  # a spike that comes back
        (falls(12.5, 8.8, 8), falls(12.6, 12.0, 8), False),  # a short run at another learning rate
        (falls(12.5, 8.8, 8), falls(25, 22, 8), True),
        (falls(12.5, 8.8, 8), falls(12.5, 12.5, 8), True),
        (falls(3.0, 2.99), falls(12.5, 6.5), False),  # one that continues another run judges none
        (falls(0, 0), falls(12.5, 6.5), False),
        (falls(12.58, 12.57), falls(12.58, 12.58), False),  # random tokens teach nothing
        (falls(12.5, 6.5, 5), falls(25, 25, 5), False),
    ],
)
def test_a_loss_that_stays_or_ends_far_above_another_of_the_same_training_is_seen(run, reference, other, far):
    rng = np.random.default_rng(len(other))
    for _ in range(20):
        sides = []
        for losses in (reference, other):
            noisy = losses * (1 + 0.002 * rng.normal(size=len(losses)))
            steps = [replace(run.steps[0], step=step, loss=loss) for step, loss in enumerate(map(float, noisy), 1)]
            sides.append(replace(run, steps=tuple(steps)))
        above = far_above(sides)
        assert (above[0], above[1] is not None) == (None, far)


@pytest.fixture
def run():
    result = read_result(LLAMA)
    return replace(result, run=replace(result.run, seed=5, evidence=evidence_of(source="log", data="mock", first_sequence="abc")))


def changed(result, *, seen=None, step=None, **fields):
    evidence = replace(result.run.evidence, **(seen or {}))
    steps = tuple(replace(one, **(step or {})) for one in result.steps)
    return replace(result, run=replace(result.run, evidence=evidence, **fields), steps=steps)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 6}, "seed"),
        ({"seed": None}, "seed"),
        ({"model": "qwen"}, "model"),
        ({"shape": None}, "model's shape"),
        ({"global_batch_sequences": 64}, "tokens a step"),
        ({"sequence_tokens": 4096, "global_batch_sequences": 64}, "sequence length"),
        ({"seen": {"data": "text"}}, "data"),
        ({"seen": {"data": None}}, "data"),
        ({"seen": {"first_sequence": "abd"}}, "first sequence"),
        ({"step": {"learning_rate": 1e-3}}, "learning rate of step 1"),
        ({"step": {"learning_rate": None}}, "learning rate of step 1"),
    ],
)
def test_runs_of_another_seed_data_or_schedule_are_no_pair(run, change, field):
    assert mismatch(run, run) is None
    why = mismatch(run, changed(run, **change))
    assert (why.kind, why.subjects[0]) == ("unlike losses", field)
    assert why.subjects[1] != why.subjects[2]
    assert pairs_of([run], [changed(run, **change)]) == ({}, why)


def test_another_dtype_engine_or_layout_makes_a_pair(run):
    other = changed(run, matmul_dtype="fp8", engine="nemo", tensor_parallel=8, data_parallel=1)
    pairs, _ = pairs_of([run, changed(run, seed=6)], [changed(other, seed=6), other])
    assert list(pairs) == [5, 6]
