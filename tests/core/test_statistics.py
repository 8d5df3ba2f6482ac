"""Statistics against scipy, and intervals against simulation: 2,000 cases each, seeded."""

import math
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import scipy  # whose parts are imported where they are used

from tprimat.core import statistics

CASES = 2000


def normal(rng, n):
    return 1 + 0.02 * rng.normal(size=n)


def skewed(rng, n):
    return np.exp(0.2 * rng.normal(size=n))


def exponential(rng, n):
    return 1 + 0.1 * rng.exponential(size=n)


def autoregressive(rng, n, rho):
    _, *noise = (rng.normal(size=n + 40) * math.sqrt(1 - rho**2)).tolist()
    return np.array(list(accumulate(noise, lambda before, value: rho * before + value, initial=0.0)))[40:]


def covers(interval, truth):
    return interval.low <= truth <= interval.high


@pytest.mark.parametrize("n", [6, 10, 20, 50])
@pytest.mark.parametrize(
    ("draw", "mean", "middle"),
    [
        (normal, 1.0, 1.0),
        (skewed, math.exp(0.02), 1.0),
        (exponential, 1.1, 1 + 0.1 * math.log(2)),
        (lambda rng, n: 1 + 0.02 * autoregressive(rng, n, 0.5), 1.0, 1.0),
        (lambda rng, n: 1 + 0.01 * autoregressive(rng, n, 0.9), 1.0, 1.0),
    ],
    ids=["normal", "skewed", "exponential", "autocorrelated", "strongly autocorrelated"],
)
def test_intervals_cover_90_percent_and_more_after_the_cut_that_every_run_gets(n, draw, mean, middle):
    rng, printed, covered = np.random.default_rng(20 + n), np.zeros(2), np.zeros(2)
    for _ in range(CASES // 2):
        seconds = draw(rng, n)
        seconds = seconds[statistics.unsteady_prefix(seconds)[0] :]
        rate, step = (
            statistics.ratio_of_sums(np.full(len(seconds), 4096.0), seconds),
            statistics.median_interval(seconds, of_steps=True),
        )
        for place, (interval, truth) in enumerate(((rate, 4096 / mean), (step, middle))):
            printed[place] += interval.low is not None
            covered[place] += interval.low is not None and covers(interval, truth)
    assert ((covered / printed) > 0.885).all(), "90 % within the noise of 1,000 cases"
    assert (printed > 0.97 * CASES / 2).all()
    if draw is normal and n >= 50:
        assert ((covered / printed) < 0.99).all(), "wide enough, and no wider"


def test_steps_much_like_the_one_before_have_no_interval():
    seconds = 1 + 0.01 * np.sin(np.arange(100) / 30)
    assert statistics.ratio_of_sums(np.ones(100), seconds).low is None
    assert statistics.median_interval(seconds, of_steps=True).low is None


def test_one_value_has_no_interval_and_two_have_students():
    assert statistics.median_interval(np.array([3.0])).low is None
    assert statistics.ratio_of_sums(np.array([3.0]), np.array([1.0])).high is None
    interval = statistics.median_interval(np.array([1.0, 2.0]))
    low, high = scipy.stats.t.interval(0.95, 1, loc=math.log(1.5), scale=scipy.stats.sem(np.log([1.0, 2.0])))
    assert (interval.low, interval.high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-6)


def test_the_scaled_mad_is_scipys():
    values = np.random.default_rng(3).normal(size=41)
    assert statistics.scaled_mad(values) == pytest.approx(scipy.stats.median_abs_deviation(values, scale="normal"))


def test_a_spike_among_equal_values_is_still_an_outlier():
    values = np.array([3.2] * 20 + [9.0])
    assert statistics.outliers(values) == 1
    assert statistics.outliers(np.full(5, 3.2)) == 0
    assert statistics.outliers(np.array([1.0, 1.01, 9.0])) == 0  # of three nobody can tell
    assert statistics.outliers(np.array([1.0, 1.01, 1.02, 0.99, 0.98, 9.0])) == 1


@pytest.mark.parametrize("n", [10, 25, 80])
def test_drift_agrees_with_scipy_on_slope_and_significance(n):
    rng = np.random.default_rng(n)
    values = 1 + 0.01 * rng.normal(size=n) + 0.0003 * np.arange(n)
    slope, p_value = statistics.drift(values)
    assert slope == pytest.approx(scipy.stats.theilslopes(values).slope)
    assert p_value == pytest.approx(scipy.stats.kendalltau(np.arange(n), values, method="asymptotic").pvalue, abs=0.06)


@pytest.mark.parametrize(("rho", "most"), [(0.0, 0.06), (0.4, 0.11)])
def test_drift_is_seldom_seen_where_there_is_none(rho, most):
    rng = np.random.default_rng(7)
    alarms = sum(statistics.drift(autoregressive(rng, 50, rho))[1] < 0.05 for _ in range(CASES)) / CASES
    assert alarms < most


def test_autocorrelation_is_found_and_white_noise_is_left_alone():
    rng = np.random.default_rng(11)
    mean = np.mean([statistics.autocorrelation(autoregressive(rng, 300, 0.5)) for _ in range(200)])
    assert mean == pytest.approx(0.5, abs=0.02)
    white = [statistics.autocorrelation(rng.normal(size=50)) for _ in range(500)]
    assert sum(value > 0 for value in white) / 500 < 0.08


def rates(rng, runs, between, n=20, noise=0.01):
    """Runs of n steps whose true rates vary by `between`."""
    levels = np.exp(between * rng.normal(size=runs))
    return [statistics.rate_of(np.full(n, 1e3), level * (1 + noise * rng.normal(size=n))) for level in levels]


@pytest.mark.parametrize(("first", "second", "between"), [(2, 2, 0.02), (3, 3, 0.0), (5, 3, statistics.BETWEEN_RUNS)])
def test_the_ratio_of_runs_covers_93_to_97_percent_however_much_runs_differ(first, second, between):
    rng = np.random.default_rng(first + second)
    intervals = [statistics.ratio_of_rates(rates(rng, first, between), rates(rng, second, between)) for _ in range(CASES // 2)]
    assert 0.93 <= sum(covers(one, 1.0) for one in intervals) / len(intervals) <= (0.97 if first > 2 else 0.985)


@pytest.mark.parametrize("runs", [1, 3])
def test_a_single_run_is_covered_where_runs_vary_as_much_as_is_assumed(runs):
    rng, between = np.random.default_rng(runs), statistics.BETWEEN_RUNS
    intervals = [statistics.ratio_of_rates(rates(rng, 1, between), rates(rng, runs, between)) for _ in range(CASES // 2)]
    assert sum(covers(one, 1.0) for one in intervals) / len(intervals) >= 0.93


@pytest.mark.parametrize("factors", [(1, 1), (1, 10), (10, 1)])
def test_as_many_runs_as_were_promised_of_the_same_spread_are_enough_and_one_fewer_is_not(factors):
    """Whichever side varies: Welch's interval of that many runs is made, and looked at."""
    shape = {n: np.resize([-1.0, 1.0, 0.5, -0.5], n) - np.resize([-1.0, 1.0, 0.5, -0.5], n).mean() for n in range(2, 200)}

    def ratio(count):
        """Of two groups whose runs have exactly these spreads."""
        groups = []
        for factor, center in zip(factors, (0.0, -0.01), strict=True):
            logs = center + 0.002 * factor * shape[count] / shape[count].std(ddof=1)
            groups.append([statistics.Rate(log=float(log), error=0.001, freedom=10) for log in logs])
        interval = statistics.ratio_of_rates(*groups)
        return interval, statistics.spreads_of(*groups)

    now, spreads = ratio(2)
    bound = 0.985
    assert now.low < bound
    needed = statistics.more_runs(now.value, bound, 2, spreads)
    assert ratio(needed - 1)[0].low <= bound < ratio(needed)[0].low


def switching(rng, n, stay):
    states = [0]
    while len(states) < n:
        states.append(states[-1] if rng.random() < stay else 1 - states[-1])
    return np.where(states, 1.1, 1.0) * (1 + 0.005 * rng.normal(size=n))


@pytest.mark.parametrize(("n", "stay"), [(10, 0.5), (20, 0.5), (50, 0.9)])
def test_two_speeds_are_found(n, stay):
    rng = np.random.default_rng(n)
    states = [statistics.two_states(switching(rng, n, stay)) for _ in range(CASES // 2)]
    assert sum(one is not None for one in states) / len(states) > 0.85
    one = next(one for one in states if one)
    assert (one.low, one.high) == (pytest.approx(1.0, rel=0.01), pytest.approx(1.1, rel=0.01))


@pytest.mark.parametrize("n", [10, 50])
@pytest.mark.parametrize("draw", [normal, skewed, exponential])
def test_two_speeds_are_seldom_found_where_there_is_one(n, draw):
    rng = np.random.default_rng(n)
    assert sum(statistics.two_states(draw(rng, n)) is not None for _ in range(CASES // 2)) < 0.05 * CASES / 2


def test_runs_whose_steps_vary_are_assumed_to_vary_as_much():
    rng = np.random.default_rng(5)
    even, uneven = (
        [statistics.rate_of(np.ones(200), np.exp(spread * rng.normal(size=200))) for _ in range(2)] for spread in (0.001, 0.03)
    )
    assert statistics.spread_between_runs(even) == statistics.BETWEEN_RUNS
    assert statistics.spread_between_runs(even, uneven) == pytest.approx(0.03, rel=0.15)
    assert statistics.spread_between_runs(even, uneven, least=0.07) == 0.07
    one, other = (statistics.ratio_of_rates(pair[:1], pair[1:]) for pair in (even, uneven))
    assert math.log(one.high / one.low) < 0.03
    assert math.log(other.high / other.low) > 0.15
    slow_at_times = statistics.rate_of(np.ones(50), np.where(np.arange(50) % 10, 1.0, 3.0) * np.exp(0.001 * rng.normal(size=50)))
    assert statistics.spread_between_runs([slow_at_times]) == statistics.BETWEEN_RUNS


def test_the_page_states_the_spread_that_single_runs_are_assumed_to_have():
    page = (Path(__file__).parent.parent.parent / "docs" / "results.md").read_text(encoding="utf8")
    dense, mixtures = (100 * spread for spread in (statistics.BETWEEN_RUNS, statistics.BETWEEN_RUNS_OF_MIXTURES))
    assert f"plus {dense:.1f} % ({mixtures:.0f} % for mixtures of experts)" in page
