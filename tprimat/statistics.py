"""Every statistic that the project uses. Each function cites its source; tests check it against scipy or by simulation.

Why closed forms for one run and a bootstrap for a verdict: in simulations of 2,000 runs each, of 10 to 50 steps, normal or
exponential, the percentile bootstrap of the median covered the truth in 90.8 to 95.0 % of them, the interpolated
order-statistic interval in 93.9 to 95.8 %; the latter needs no random numbers and costs microseconds. So the intervals of a
single run are closed forms, and only the ratio of two groups of runs, which has none, is resampled.

Limits, from the same simulations: 10 to 20 steps cannot show how strongly they are autocorrelated (AR(1), 0.3 and more), so
intervals cover less than 95 %; and the mean of a short run misses rare slow steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CONFIDENCE = 0.95
FALSE_ALARM = 0.05
MAD_TO_SIGMA = 1.4826022185056018
"""1 / Phi^-1(3/4): makes the MAD of a normal sample estimate its standard deviation (Rousseeuw and Croux 1993, section 1)."""
MEAN_DEVIATION_TO_SIGMA = math.sqrt(math.pi / 2)
NORMAL_QUANTILE = 1.959963984540054
"""Phi^-1(0.975)."""
T_QUANTILES = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139)
"""Student's t at 0.975 for 1 to 10 degrees of freedom."""
FEWEST_FREEDOM = 3
"""Fewest degrees of freedom that autocorrelation leaves. With 1 or 2, quantiles of 12.7 and 4.3 multiply an error that the same
autocorrelation has already widened: in simulations (AR(1) of 0.3 to 0.8, 10 to 50 steps) the intervals become up to four
times as wide as with 3 and cover the mean no more often (59 and 59 % of 10 steps at 0.8, 87 and 87 % of 20 at 0.6)."""
MOST_POINTS = 500
"""Longer series are averaged in consecutive groups, down to this many, before pairwise work or resampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with its 95 % interval; the ends are None where one sample is all there is."""

    value: float
    low: float | None
    high: float | None


def t_quantile(freedom: int) -> float:
    """Return Student's t at 0.975: tabulated, and from 11 degrees of freedom by Cornish-Fisher (Abramowitz and Stegun 26.7.5)."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[max(freedom, 1) - 1]
    z = NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def scaled_mad(values: Array) -> float:
    """Return the median absolute deviation, scaled to estimate a standard deviation (Hampel 1974).

    Where more than half of the values are equal, as in logs that print few digits, the MAD is 0; then the scaled mean absolute
    deviation takes its place (Iglewicz and Hoaglin 1993, page 12).
    """
    distance = np.abs(values - np.median(values))
    spread = float(np.median(distance)) * MAD_TO_SIGMA
    return spread if spread > 0 else float(distance.mean()) * MEAN_DEVIATION_TO_SIGMA


def outliers(values: Array) -> int:
    """Count the values further than 3 scaled MAD from the median (Leys et al. 2013, doi:10.1016/j.jesp.2013.03.013).

    Returns 0 below 6 values, whose MAD says little about their spread.
    """
    if len(values) < 6:
        return 0
    return int((np.abs(values - np.median(values)) > 3 * scaled_mad(values)).sum())


def autocorrelation(values: Array) -> float:
    """Return the lag-1 autocorrelation, 0 unless significantly positive, corrected for bias (Marriott and Pope 1954).

    Returns:
        In [0, 0.9]. Negative correlation, which would make intervals narrower, counts as 0.
    """
    n, centred = len(values), values - values.mean()
    power = float(centred @ centred)
    if n < 8 or power <= 0:
        return 0.0
    rho = float(centred[:-1] @ centred[1:]) / power
    if rho * math.sqrt(n) < 1.645:
        return 0.0
    return min(0.9, (n * rho + 1) / (n - 3))


def variance_inflation(values: Array) -> float:
    """Return the variance inflation of a mean by autocorrelation: (1 + r) / (1 - r) for AR(1) (Bayley and Hammersley 1946)."""
    rho = autocorrelation(values)
    return (1 + rho) / (1 - rho)


@lru_cache(maxsize=4096)
def median_ranks(n: int) -> tuple[int, float]:
    """Return rank k (from 1) and the weight of the next rank inwards of the median's 95 % interval; n >= 6.

    Order statistics k and n + 1 - k enclose the median with a binomial probability; interpolation between two such intervals
    meets 95 % closely for any continuous distribution (Hettmansperger and Sheather 1986, doi:10.1016/0167-7152(86)90021-0).
    """
    if n > 200:
        position = (n + 1) / 2 - NORMAL_QUANTILE * math.sqrt(n) / 2
        return int(position), position - int(position)
    rank, tail = 1, 0.5**n
    while 1 - 2 * (following := tail + math.comb(n, rank) * 0.5**n) >= CONFIDENCE:
        rank, tail = rank + 1, following
    outer, inner = 1 - 2 * tail, 1 - 2 * following
    share = (outer - CONFIDENCE) / (outer - inner)
    return rank, (n - rank) * share / (rank + (n - 2 * rank) * share)


def median_interval(values: Array) -> Interval:
    """Return the median of positive values and its 95 % interval: distribution-free from 6 on, Student's t from 2 to 5.

    Autocorrelation widens both arms by the square root of the variance inflation. Arms are factors (lengths on the log scale), so
    that a duration stays positive.
    """
    n, centre = len(values), float(np.median(values))
    if n < 2:
        return Interval(value=centre, low=None, high=None)
    if n < 6:
        factor = math.exp(t_quantile(n - 1) * float(np.log(values).std(ddof=1)) / math.sqrt(n))
        return Interval(value=centre, low=centre / factor, high=centre * factor)
    low, high = _median_bounds(np.sort(values))
    wider = math.sqrt(variance_inflation(values))
    return Interval(value=centre, low=centre * (low / centre) ** wider, high=centre * (high / centre) ** wider)


def _median_bounds(ordered: Array) -> tuple[float, float]:
    n = len(ordered)
    rank, weight = median_ranks(n)
    low = (1 - weight) * ordered[rank - 1] + weight * ordered[rank]
    high = (1 - weight) * ordered[n - rank] + weight * ordered[n - rank - 1]
    return float(low), float(high)


def ratio_of_sums(numerator: Array, denominator: Array) -> Interval:
    """Return sum(numerator) / sum(denominator) and its 95 % interval by the delta method on the log scale (Cochran 1977, 6.4).

    Args:
        numerator: shape (n,), such as tokens.
        denominator: shape (n,), positive, such as seconds.
    """
    n, total = len(numerator), float(denominator.sum())
    ratio = float(numerator.sum()) / total
    if n < 2 or ratio <= 0:
        return Interval(value=ratio, low=None, high=None)
    residual = numerator - ratio * denominator
    inflation = variance_inflation(residual)
    error = math.sqrt(n / (n - 1) * float(residual @ residual) * inflation) / total / ratio
    arm = t_quantile(max(min(n - 1, FEWEST_FREEDOM), round(n / inflation) - 1)) * error
    return Interval(value=ratio, low=ratio * math.exp(-arm), high=ratio * math.exp(arm))


def mean_of_runs(values: Array) -> Interval:
    """Return the geometric mean of runs with Student's 95 % interval on the log scale, from their spread; none for one run."""
    logs = np.log(values)
    centre, n = float(logs.mean()), len(logs)
    if n < 2:
        return Interval(value=float(values[0]), low=None, high=None)
    arm = t_quantile(n - 1) * float(logs.std(ddof=1)) / math.sqrt(n)
    return Interval(value=math.exp(centre), low=math.exp(centre - arm), high=math.exp(centre + arm))


def between_run_deviation(values: Array, errors: Array) -> float:
    """Return the relative standard deviation between runs, without the part that the noise of steps explains.

    Method of moments of the one-way random-effects model (Searle, Casella and McCulloch 1992, section 3.6), on the log scale.

    Args:
        values: shape (k,), k >= 2, positive.
        errors: shape (k,), relative standard error of each from its own steps.
    """
    return math.sqrt(max(0.0, float(np.log(values).var(ddof=1)) - float((errors**2).mean())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A monotonic trend."""

    p_value: float
    slope: float
    """Theil-Sen: units per step."""


def group_means(values: Array) -> tuple[Array, int]:
    """Return the means of at most MOST_POINTS consecutive groups, and the size of a group. A last, partial group is dropped."""
    size = -(-len(values) // MOST_POINTS)
    whole = len(values) // size * size
    return values[:whole].reshape(-1, size).mean(axis=1), size


def drift(values: Array) -> Drift | None:
    """Mann-Kendall trend test with tie correction (Mann 1945, Kendall 1975) and Theil-Sen slope (Sen 1968); None below 10 values.

    The variance is corrected for autocorrelation of the detrended series (Hamed and Rao 1998, doi:10.1016/S0022-1694(97)00125-X,
    here with the AR(1) factor); simulated AR(1) noise of 0.4 over 50 steps then passes for a trend in 1 of 10 runs.
    """
    if len(values) < 10:
        return None
    series, size = group_means(values)
    n = len(series)
    early, late = np.triu_indices(n, 1)
    rise = series[late] - series[early]
    slope = float(np.median(rise / (late - early)))
    score = float(np.sign(rise).sum())
    _, ties = np.unique(series, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    variance *= variance_inflation(series - slope * np.arange(n))
    if variance <= 0:
        return Drift(p_value=1.0, slope=0.0)
    z = max(0.0, abs(score) - 1) / math.sqrt(variance)
    return Drift(p_value=math.erfc(z / math.sqrt(2)), slope=slope / size)


def slow_prefix(values: Array) -> int:
    """Return how many leading values are warm-up, a slow first stretch: 0 to half of them.

    The later half gives the steady level (median) and spread (scaled MAD, not under 0.1 % of the level, which is what logs
    resolve). Each value's log likelihood ratio for being 3 spreads slower is summed from the start (Page 1954,
    doi:10.1093/biomet/41.1-2.100); the stretch ends where the sum peaks, if the peak passes log(1 / FALSE_ALARM): by Ville's
    inequality steady values do so with at most that probability, the level and spread being known. Values count as at most
    4 spreads off, so that one late spike cannot extend the warm-up.
    """
    if len(values) < 4:
        return 0
    steady = values[len(values) // 2 :]
    level = float(np.median(steady))
    spread = max(scaled_mad(steady), 1e-3 * level)
    evidence = np.cumsum(3 * (np.clip((values[: len(values) // 2] - level) / spread, -4, 4) - 1.5))
    last = int(evidence.argmax())
    return last + 1 if evidence[last] >= math.log(1 / FALSE_ALARM) else 0


def cliffs_delta(first: Array, second: Array) -> float:
    """Return P(first > second) - P(first < second), in -1..1 (Cliff 1993, doi:10.1037/0033-2909.114.3.494)."""
    ordered = np.sort(second)
    below = np.searchsorted(ordered, first, side="left").sum()
    above = (len(second) - np.searchsorted(ordered, first, side="right")).sum()
    return float(below - above) / (len(first) * len(second))


MOST_DRAWS = 1_000_000
"""Limit of resamples times runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The steady steps of one run."""

    tokens: Array
    """Shape (n,)."""
    seconds: Array
    """Shape (n,)."""

    @property
    def log_throughput(self) -> float:
        """Return the log of sum(tokens) / sum(seconds)."""
        return math.log(float(self.tokens.sum()) / float(self.seconds.sum()))


def block_length(values: Array) -> int:
    """Return the steps per block of the bootstrap: 1 without autocorrelation, else Carlstein's (1986) optimum for AR(1)."""
    rho = autocorrelation(values)
    length = (math.sqrt(6) * rho / (1 - rho**2)) ** (2 / 3) * len(values) ** (1 / 3)
    return int(min(max(1, round(length), -(-len(values) // MOST_POINTS)), max(1, len(values) // 4)))


def resampled_log_throughput(sample: Sample, resamples: int, rng: np.random.Generator) -> Array:
    """Resample one run's log throughput in circular blocks of steps (Politis and Romano 1992); shape (resamples,)."""
    n = len(sample.seconds)
    length = block_length(sample.seconds)
    starts = rng.integers(0, n, size=(resamples, n // length))
    sums = []
    for values in (sample.tokens, sample.seconds):
        running = np.concatenate(([0.0], np.cumsum(np.concatenate((values, values[: length - 1])))))
        sums.append((running[length:] - running[:-length])[starts].sum(axis=1))
    return np.asarray(np.log(sums[0]) - np.log(sums[1]))


def bootstrap_log_throughput(samples: Sequence[Sample], resamples: int, rng: np.random.Generator) -> Array:
    """Resample the mean log throughput of a group of runs: first runs, then steps in each.

    Plain two-stage resampling gets the variance wrong twice: steps count double, since the runs' own values already vary with
    theirs (Davison and Hinkley 1997, section 3.8), and k values drawn again vary (k - 1) / k of what they should (Hesterberg
    2015, doi:10.1080/00031305.2015.1089789). So the draws keep their shape and are scaled to the variance of a mean of k runs.

    Returns:
        Shape (resamples,), centred on the mean of the runs' own log throughputs; fewer for hundreds of runs, to bound memory.
    """
    resamples = min(resamples, max(200, MOST_DRAWS // len(samples)))
    observed = np.array([sample.log_throughput for sample in samples])
    within = np.stack([resampled_log_throughput(sample, resamples, rng) for sample in samples])
    runs, centre = len(samples), float(observed.mean())
    if runs == 1:
        steps = len(samples[0].seconds)
        return np.asarray(centre + (within[0] - centre) * math.sqrt(steps / max(1, steps - 1)))
    chosen = rng.integers(0, runs, size=(runs, resamples))
    draws = np.stack([within[row, rng.permutation(resamples)] for row in chosen]).mean(axis=0)
    spread = float(draws.std())
    wanted = float(observed.std(ddof=1)) / math.sqrt(runs)
    return np.asarray(centre + (draws - centre) * (wanted / spread if spread > 0 else 1.0))
