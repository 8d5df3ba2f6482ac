"""Every statistic that the project uses. Each function cites its source; tests check it by simulation.

How often intervals cover the truth, by simulation, is in benchmarks/results/statistics.md (tools/statistics_page.py).
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
FEWEST_FREEDOM = 3
"""Fewest degrees of freedom that autocorrelation leaves: the quantiles of fewer multiply an error that it has already widened."""
MOST_POINTS = 500
"""Longer series are averaged in consecutive groups, down to this many, before pairwise work or resampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with its 95 % interval; the ends are None where one sample is all there is."""

    value: float
    low: float | None = None
    high: float | None = None


@lru_cache(maxsize=4096)
def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """Return the number that Student's t stays below, in absolute value, with a probability."""
    from scipy.special import stdtrit  # imported late, as below: it takes as long as all else that most commands import

    return float(stdtrit(freedom, (1 + confidence) / 2))


def median(values: Array) -> float:
    """Return the median of a series; of a short one in a tenth of the time that np.median takes."""
    ordered, middle = np.sort(values), len(values) // 2
    return float(ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)


def scaled_mad(values: Array) -> float:
    """Return the median absolute deviation, scaled to estimate a standard deviation (Hampel 1974).

    Where more than half of the values are equal, as in logs that print few digits, the MAD is 0; then the scaled mean absolute
    deviation takes its place (Iglewicz and Hoaglin 1993, page 12).
    """
    distance = np.abs(values - median(values))
    spread = median(distance) * MAD_TO_SIGMA
    return spread if spread > 0 else float(distance.mean()) * MEAN_DEVIATION_TO_SIGMA


def outliers(values: Array) -> int:
    """Count the values further than 3 scaled MAD from the median (Leys et al. 2013, doi:10.1016/j.jesp.2013.03.013)."""
    if len(values) < 6:  # whose MAD says little about their spread
        return 0
    return int((np.abs(values - median(values)) > 3 * scaled_mad(values)).sum())


def autocorrelation(values: Array, evidence: float = 1.645) -> float:
    """Return the lag-1 autocorrelation in [0, 0.9], corrected for bias (Marriott and Pope 1954).

    It counts from `evidence` standard errors above 0 on; 1.645 is significant (one-sided, 5 %). Negative correlation, which would
    make intervals narrower, counts as 0.
    """
    n, centred = len(values), values - values.mean()
    power = float(centred @ centred)
    if n < 8 or power <= 0:
        return 0.0
    rho = float(centred[:-1] @ centred[1:]) / power
    if rho * math.sqrt(n) < evidence:
        return 0.0
    return min(0.9, (n * rho + 1) / (n - 3))


CAUTIOUS = 0.5
"""Standard errors from which a correlation widens intervals, long before it is significant: 20 steps seldom prove one of 0.5."""


def variance_inflation(values: Array, evidence: float = CAUTIOUS) -> float:
    """Return the variance inflation of a mean by autocorrelation: (1 + r) / (1 - r) for AR(1) (Bayley and Hammersley 1946)."""
    rho = autocorrelation(values, evidence)
    return (1 + rho) / (1 - rho)


CORRELATIONS = np.sin(math.asin(0.995) * (np.arange(24) + 0.5) / 24)
"""Autocorrelations that steps may have, 0 to 0.995, equally likely before they are seen: the reference prior, proportional to
1 / sqrt(1 - r^2) (Berger and Yang 1994, doi:10.1017/S026646660000863X)."""
TOO_ALIKE, SURELY = 0.95, 0.9
"""Autocorrelation above which steps say too little about their mean for an interval, and the probability from which they do."""


def mean_of_steps(values: Array) -> tuple[float, bool]:
    """Return the half width of the 95 % interval of a mean of AR(1) steps, and whether they are too alike for one; from 2 on.

    Few steps do not show how much each depends on the one before. So the interval is that of the posterior of the mean over
    CORRELATIONS, with flat priors of mean and log variance: for each of them Student's t about the generalized least squares
    mean (Zellner and Tiao 1964, doi:10.1080/01621459.1964.10480726). It is several times as wide as Student's for 10 steps,
    and about as wide for 50 that look independent.
    """
    from scipy.special import stdtr

    n, r, off = len(values), CORRELATIONS, values - values.mean()
    if float(off @ off) <= 0:
        return 0.0, False
    ends = float(off[0] + off[-1])
    ones, cross = n - 2 * r * (n - 1) + r**2 * (n - 2), ends * r * (1 - r)
    squares = off @ off - 2 * r * (off[:-1] @ off[1:]) + r**2 * (off[1:-1] @ off[1:-1]) - cross**2 / ones
    squares = np.maximum(squares, 1e-12 * float(off @ off))
    likely = 0.5 * np.log((1 - r**2) / ones) - (n - 1) / 2 * np.log(squares)
    weights = np.exp(likely - likely.max())
    weights /= weights.sum()
    center, scale = cross / ones, np.sqrt(squares / (n - 1) / ones)
    low, high = 0.0, float((np.abs(center) + t_quantile(n - 1) * scale).max())
    arm, center = high, np.array((center, -center))
    density = math.exp(math.lgamma(n / 2) - math.lgamma((n - 1) / 2)) / math.sqrt((n - 1) * math.pi) / scale
    while high - low > 1e-12 * high:  # Newton's steps on both log scales, since tails are near to powers; or else the middle
        far = (arm - center) / scale
        outside = max(float((stdtr(n - 1, -far) @ weights).sum()), 1e-300)
        falls = arm / outside * float(((1 + far**2 / (n - 1)) ** (-n / 2) @ (weights * density)).sum())
        low, high = (arm, high) if outside > 1 - CONFIDENCE else (low, arm)
        before, arm = arm, arm * (outside / (1 - CONFIDENCE)) ** (1 / max(falls, 0.01))
        if abs(arm - before) < 1e-12 * before:
            break
        arm = arm if low < arm < high else (low + high) / 2
    return arm, float(weights[r > TOO_ALIKE].sum()) > SURELY


@lru_cache(maxsize=4096)
def median_ranks(n: int) -> tuple[int, float]:
    """Return rank k (from 1) and the weight of the next rank inwards of the median's 95 % interval; n >= 6.

    Order statistics k and n + 1 - k enclose the median with a binomial probability; interpolation between two such intervals
    meets 95 % closely for any continuous distribution (Hettmansperger and Sheather 1986, doi:10.1016/0167-7152(86)90021-0).
    """
    from scipy.special import bdtr

    enclosed = 1 - 2 * bdtr(np.arange((n + 1) // 2), n, 0.5)
    rank = int((enclosed >= CONFIDENCE).sum())
    outer, inner = float(enclosed[rank - 1]), float(enclosed[rank])
    share = (outer - CONFIDENCE) / (outer - inner)
    return rank, (n - rank) * share / (rank + (n - 2 * rank) * share)


def median_interval(values: Array, *, of_steps: bool = False) -> Interval:
    """Return the median of positive values and its 95 % interval: distribution-free from 6 on, Student's t from 2 to 5.

    Autocorrelation widens both arms by the square root of the variance inflation, and those of the steps of a run as it does the
    interval of their mean; where they are too alike, they have none. Arms are factors, so that a duration stays positive.
    """
    n, center = len(values), median(values)
    arm, alike = mean_of_steps(values) if of_steps and n > 1 else (0.0, False)
    if n < 2 or alike:
        return Interval(value=center)
    student = t_quantile(n - 1) * float(values.std(ddof=1)) / math.sqrt(n)
    wider = arm / student if arm > 0 else math.sqrt(variance_inflation(values))
    if n < 6:
        factor = math.exp(min(300.0, t_quantile(n - 1) * wider * float(np.log(values).std(ddof=1)) / math.sqrt(n)))  # finite
        return Interval(value=center, low=center / factor, high=center * factor)
    ordered, (rank, weight) = np.sort(values), median_ranks(n)
    low = float((1 - weight) * ordered[rank - 1] + weight * ordered[rank])
    high = float((1 - weight) * ordered[n - rank] + weight * ordered[n - rank - 1])
    return Interval(value=center, low=center * (low / center) ** wider, high=center * (high / center) ** wider)


def ratio_of_sums(numerator: Array, denominator: Array) -> Interval:
    """Return sum(numerator) / sum(denominator) and its 95 % interval by the delta method on the log scale (Cochran 1977, 6.4).

    Shapes are (n,); the denominator, such as seconds, is positive. No interval where each value is much like the one before.
    """
    ratio = float(numerator.sum()) / float(denominator.sum())
    arm, alike = mean_of_steps(numerator - ratio * denominator) if len(numerator) > 1 and ratio > 0 else (0.0, True)
    if alike:
        return Interval(value=ratio)
    factor = math.exp(arm / float(denominator.mean()) / ratio)
    return Interval(value=ratio, low=ratio / factor, high=ratio * factor)


def mean_of_runs(values: Array) -> Interval:
    """Return the geometric mean of runs with Student's 95 % interval on the log scale, from their spread; none for one run."""
    logs = np.log(values)
    center, n = float(logs.mean()), len(logs)
    if n < 2:
        return Interval(value=float(values[0]))
    arm = t_quantile(n - 1) * float(logs.std(ddof=1)) / math.sqrt(n)
    return Interval(value=math.exp(center), low=math.exp(center - arm), high=math.exp(center + arm))


pairs = lru_cache(maxsize=4)(np.triu_indices)
"""The places of all pairs of a series, the earlier and the later one; the largest take two megabytes."""


def drift(values: Array) -> tuple[float, float]:
    """Return the Theil-Sen slope of a monotonic trend (Sen 1968), in units per step, and its p value; 0 and 1 below 10 values.

    The test is Mann-Kendall's with tie correction (Mann 1945, Kendall 1975), of the means of at most MOST_POINTS groups.
    The variance is corrected for autocorrelation of the detrended series (Hamed and Rao 1998, doi:10.1016/S0022-1694(97)00125-X,
    here with the AR(1) factor); simulated AR(1) noise of 0.4 over 50 steps then passes for a trend in 1 of 10 runs.
    """
    if len(values) < 10:
        return 0.0, 1.0
    size = -(-len(values) // MOST_POINTS)
    series = values[: len(values) // size * size].reshape(-1, size).mean(axis=1)
    n = len(series)
    early, late = pairs(n, 1)
    rise = series[late] - series[early]
    slope = median(rise / (late - early))
    score = float(np.sign(rise).sum())
    _, ties = np.unique(series, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    variance *= variance_inflation(series - slope * np.arange(n), 1.645)
    if variance <= 0:
        return 0.0, 1.0
    z = max(0.0, abs(score) - 1) / math.sqrt(variance)
    return slope / size, math.erfc(z / math.sqrt(2))


NOTABLE_LEAD = 0.005
"""Fraction by which a first stretch must be faster to be left out."""


def unsteady_prefix(values: Array) -> tuple[int, bool]:
    """Return how many leading values, 0 to half of all, differ from what follows, and whether they are smaller.

    They are slower in a warm-up, and faster before a clock falls. The later half gives the steady level (median) and spread
    (scaled MAD, not under 0.1 % of the level, which is what logs resolve). Each value's log likelihood ratio for being 3
    spreads slower is summed from the start (Page 1954, doi:10.1093/biomet/41.1-2.100); the stretch ends where the sum peaks,
    if the peak passes log(1 / FALSE_ALARM). By Ville's inequality steady values do so with at most that probability if level
    and spread are known; of short series they are not (benchmarks/results/statistics.md has how often some are lost). Values
    count as at most 4 spreads off, so that one late spike cannot extend the stretch. Where none is slower, a faster one is looked
    for in the same way, faster by NOTABLE_LEAD, with ten times the evidence, and more like a step than like a drift.
    """
    if len(values) < 4:
        return 0, False
    steady = values[len(values) // 2 :]
    level = median(steady)
    spread = max(scaled_mad(steady), 1e-3 * level)
    distance = np.clip((values[: len(values) // 2] - level) / spread, -4, 4)
    slower = np.cumsum(3 * (distance - 1.5))
    last = int(slower.argmax())
    if slower[last] >= math.log(1 / FALSE_ALARM):
        return last + 1, False
    faster = np.cumsum(3 * (-distance - 1.5))
    last = int(faster.argmax())
    early, late, steps = values[: last + 1], values[last + 1 :], np.arange(len(values))
    if faster[last] < math.log(10 / FALSE_ALARM) or float(early.mean()) >= (1 - NOTABLE_LEAD) * level:
        return 0, False
    line = np.polyval(np.polyfit(steps, values, 1), steps)
    levels = float(((early - early.mean()) ** 2).sum() + ((late - late.mean()) ** 2).sum())
    is_step = levels < float(((values - line) ** 2).sum())
    return (last + 1, True) if is_step else (0, False)


def mean_interval(values: Array, least_inflation: float = 1.0) -> Interval:
    """Return the mean of a series with Student's interval, widened by autocorrelation; none for a single value.

    `least_inflation` is that of the variance, where a short series cannot show how much its values depend on each other.
    """
    n, center = len(values), float(values.mean())
    if n < 2:
        return Interval(value=center)
    inflation = max(variance_inflation(values), least_inflation)
    freedom = max(min(n - 1, FEWEST_FREEDOM), round(n / inflation) - 1)
    arm = t_quantile(freedom) * math.sqrt(float(values.var(ddof=1)) * inflation / n)
    return Interval(value=center, low=center - arm, high=center + arm)


# The ratio of two groups of runs. The run is the unit: steps of one run share whatever that run met.

BETWEEN_RUNS = 0.004
"""Relative standard deviation between runs of one configuration on one machine, where a single run shows none: from our
records on H200 (benchmarks/results/statistics.md), and a guess for any other machine."""
BETWEEN_RUNS_OF_MIXTURES = 0.07
"""The same of mixtures of experts, which differ much more in those records."""
BETWEEN_RUNS_FREEDOM = 10
"""Degrees of freedom that both are given: fewer than the records have, since they are of one kind of machine."""
FEWEST_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The throughput of one run."""

    log: float
    """Of sum(tokens) / sum(seconds)."""
    error: float | None
    """Standard error of `log` from the run's own steps; None for a single step."""
    freedom: int
    step_spread: float = 0.0
    """Robust standard deviation of log tokens/s of its steps, which rare slow steps do not change."""


FLOOR = 2.5
"""Variance inflation that the steps of a short run have at least; from 8 on it falls. With the assumed spread between runs,
ratios of single runs then cover 1 in 95 % of cases and more up to AR(1) of 0.9 (benchmarks/results/statistics.md)."""


def rate_of(tokens: Array, seconds: Array) -> Rate:
    """Return the throughput of a run with the error that its steps show, both of shape (n,)."""
    n, total = len(tokens), float(seconds.sum())
    ratio = float(tokens.sum()) / total
    logs = np.log(tokens / seconds) if (tokens > 0).all() else np.zeros(1)
    spread = 1.4826 * median(np.abs(logs - median(logs)))  # a standard deviation over a MAD, of a normal distribution
    if n < 2:
        return Rate(log=math.log(ratio), error=None, freedom=0, step_spread=spread)
    residual = tokens - ratio * seconds
    inflation = max(variance_inflation(residual), min(FLOOR, 1 + 8 * FLOOR / n))
    error = math.sqrt(n / (n - 1) * float(residual @ residual) * inflation) / total / ratio
    freedom = max(min(n - 1, FEWEST_FREEDOM), round(n / inflation) - 1)
    return Rate(log=math.log(ratio), error=error, freedom=freedom, step_spread=spread)


def spread_between_runs(*groups: Sequence[Rate], least: float = BETWEEN_RUNS) -> float:
    """Return the relative standard deviation that single runs are assumed to have: at least that of the steps of such runs.

    In our records runs vary by no more than the steps of one of them (benchmarks/results/statistics.md).
    """
    spreads = [math.sqrt(sum(rate.step_spread**2 for rate in group) / len(group)) for group in groups if group]
    return max(least, *spreads)


def ratio_of_rates(first: Sequence[Rate], second: Sequence[Rate], assumed: float = BETWEEN_RUNS) -> Interval:
    """Return the throughput of the second group of runs over the first, with an interval on the log scale.

    With two runs or more on each side: Welch's (1947, doi:10.2307/2332510), from the spread of each side's runs alone, which may
    differ. With a single run, the variance of a run is what its steps show plus the square of `spread_between_runs`, which is at
    least `assumed`, updated by the runs of the other side (Gelman et al., Bayesian Data Analysis, 3rd edition, section 2.6). Then
    there is no interval where a run has a single step. Degrees of freedom by Satterthwaite (1946, doi:10.2307/3002019).
    """
    logs = [np.array([rate.log for rate in group]) for group in (first, second)]
    center = float(logs[1].mean() - logs[0].mean())
    if min(len(first), len(second)) > 1:
        parts = [(float(group.var(ddof=1)) / len(group), len(group) - 1.0) for group in logs]
    else:
        within = [(rate.error, rate.freedom, len(group)) for group in (first, second) for rate in group if rate.error is not None]
        if len(within) < len(first) + len(second):
            return Interval(value=math.exp(center))
        squares, spare = sum(float(((group - group.mean()) ** 2).sum()) for group in logs), len(within) - 2
        seen = max(0.0, squares - spare * sum(error**2 for error, _, _ in within) / len(within))
        least, freedom = spread_between_runs(first, second, least=assumed), float(BETWEEN_RUNS_FREEDOM + spare)
        between = (BETWEEN_RUNS_FREEDOM * least**2 + seen) / freedom
        parts = [((error / count) ** 2, float(degrees)) for error, degrees, count in within]  # of the steps of each run
        parts.append((between * (1 / len(first) + 1 / len(second)), freedom))
    variance = sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / df for part, df in parts) if variance > 0 else 1.0
    arm = t_quantile(freedom) * math.sqrt(variance)
    return Interval(value=math.exp(center), low=math.exp(center - arm), high=math.exp(center + arm))


MOST_RUNS = 10_000


def spreads_of(first: Sequence[Rate], second: Sequence[Rate]) -> tuple[float, float] | None:
    """Return the standard deviation of a run's log throughput on each side; None where a side has a single run."""
    if min(len(first), len(second)) < 2:
        return None
    one, other = (float(np.std([rate.log for rate in group], ddof=1)) for group in (first, second))
    return one, other


def more_runs(value: float, bound: float, runs: int, spreads: tuple[float, float]) -> int | None:
    """Return how many runs per side would bring the low end of a ratio above a bound, by Welch's interval; None where none would.

    Each side has at least `runs` now, whose log throughput has these standard deviations, which further runs keep.
    """
    if value <= bound:
        return None
    first, second = (spread**2 for spread in spreads)
    variance = first + second
    for count in range(max(runs, 2), MOST_RUNS + 1):
        freedom = max(1.0, (count - 1) * variance**2 / (first**2 + second**2)) if variance else 1.0
        if t_quantile(freedom) * math.sqrt(variance / count) < math.log(value / bound):
            return count
    return None


# Steps of two speeds.

APART = 7.0
"""Distance of two states in standard deviations within them; the best split of one normal sample reaches 3, that of ten
exponential steps occasionally 6."""
OWN_SHARE = 0.15
"""Fraction of the steps that the rarer state has; fewer are outliers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoStates:
    """A sample that switches between two levels, as a GPU does whose clock is held back occasionally."""

    low: float
    high: float
    share_high: float


def two_states(values: Array) -> TwoStates | None:
    """Return both levels of a sample that has two, None for any other; from 8 values on.

    The split with the least variance within both parts (Fisher 1958, doi:10.1080/01621459.1958.10501479) must leave a gap of 40 %
    of the levels' distance, and that distance must be APART standard deviations.
    """
    n = len(values)
    if n < 8:
        return None
    ordered, sizes = np.sort(values), np.arange(1, n)
    sums, squares = np.cumsum(ordered), np.cumsum(ordered**2)
    below = squares[:-1] - sums[:-1] ** 2 / sizes
    above = squares[-1] - squares[:-1] - (sums[-1] - sums[:-1]) ** 2 / (n - sizes)
    fewest = max(2, math.ceil(OWN_SHARE * n))
    place = fewest - 1 + int((below + above)[fewest - 1 : n - fewest].argmin())
    low, high = ordered[: place + 1], ordered[place + 1 :]
    distance = float(high.mean() - low.mean())
    within = math.sqrt(max(0.0, float(below[place] + above[place])) / (n - 2))
    if distance <= APART * within or high[0] - low[-1] <= 0.4 * distance or distance < 1e-3 * float(low.mean()):
        return None
    return TwoStates(low=float(low.mean()), high=float(high.mean()), share_high=len(high) / n)
