"""Scaling of throughput with GPUs: multiplier, efficiency, and the laws of Amdahl and Gunther.

Weak scaling gives every GPU the same work and grows the batch; strong scaling divides one batch. The tokens of a step decide
which of them a series is, not its name.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tprimat.analyze.compare import assumed_spread, run_rates
from tprimat.analyze.groups import Group, group_estimate, on_cpu
from tprimat.analyze.metrics import scaled
from tprimat.analyze.traits import FORBIDDING, TRAITS, accelerator_name, differing_traits, layout, model_name, tokens_per_step
from tprimat.core.errors import MetricError
from tprimat.core.statistics import BETWEEN_RUNS, Array, Rate, ratio_of_rates, t_quantile
from tprimat.records.schema import Estimate, RunRecord

Kind = Literal["weak", "strong", "mixed", "unknown"]

Key = Callable[[Group], tuple[object, ...]]

ALIKE = 0.01
"""Relative difference up to which two amounts of work are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The measurement on one number of GPUs."""

    gpus: int
    nodes: int | None
    tokens_per_second: Estimate
    """Throughput of all GPUs."""
    tokens: float | None
    """In total; None where only a rate is known."""
    layout: str = ""
    runs: int | None = None
    """Behind it; None: a printed figure."""
    rates: tuple[Rate, ...] = ()
    """Tokens/s of one GPU in each run; none: a printed figure."""
    assumed_spread: float = BETWEEN_RUNS
    """Relative standard deviation between runs, where there is one run."""

    @property
    def per_gpu(self) -> float:
        """Return the tokens/s of one GPU."""
        return self.tokens_per_second.value / self.gpus

    @property
    def seconds(self) -> float | None:
        """Return the elapsed time for the tokens."""
        return None if self.tokens is None else self.tokens / self.tokens_per_second.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A point relative to the smallest one of its series."""

    point: Point
    multiplier: Estimate
    """Throughput over that of the smallest."""
    efficiency: Estimate
    """Throughput per GPU over that of the smallest; of the smallest itself and of printed figures without an interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A configuration that was measured, and is a point of no series."""

    label: str
    gpus: int | None
    why: str
    name: str
    """Shorter than the label."""
    reason: str
    """What many have in common: 'differing in strategy'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One workload on rising numbers of GPUs."""

    name: str
    kind: Kind
    points: tuple[Point, ...]
    """By number of GPUs, each number once, two or more."""
    differing: tuple[str, ...] = ()
    """Further traits in which the points differ, with their values."""
    left_out: tuple[LeftOut, ...] = ()
    """Configurations that counted and are in no series, at the series that is most like them."""
    on_cpu: bool = False
    """Its GPUs are processes, which share one CPU."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return the multiplier and efficiency of each point."""
        return tuple(_row(self.points[0], point) for point in self.points)


def _row(first: Point, point: Point) -> Row:
    value = point.per_gpu / first.per_gpu
    efficiency = Estimate(value=value, low=None, high=None, samples=1)
    if point is not first and first.rates and point.rates:
        spread = max(first.assumed_spread, point.assumed_spread)
        ratio = ratio_of_rates(first.rates, point.rates, assumed=spread)
        efficiency = replace(efficiency, low=ratio.low, high=ratio.high, samples=len(first.rates) + len(point.rates))
    return Row(point=point, multiplier=scaled(efficiency, point.gpus / first.gpus, efficiency.samples), efficiency=efficiency)


def series(name: str, points: Iterable[Point], work: Sequence[float | None]) -> Series:
    """Build a series in order of GPUs.

    Args:
        name: for tables and legends.
        points: any order.
        work: of a step (or of a whole run of equally many steps) at each point, in tokens; decides between weak and strong.

    Raises:
        MetricError: fewer than two numbers of GPUs, or one of them twice.
    """
    ordered = sorted(zip(points, work, strict=True), key=lambda pair: pair[0].gpus)
    counts = [point.gpus for point, _ in ordered]
    if len(set(counts)) < max(2, len(counts)):
        raise MetricError(
            f"{name or 'The series'} has {counts} GPUs.", why="Scaling needs two or more numbers of GPUs, each of them once."
        )
    return Series(name=name, kind=_kind(counts, [amount for _, amount in ordered]), points=tuple(point for point, _ in ordered))


def _kind(gpus: Sequence[int], work: Sequence[float | None]) -> Kind:
    known = [amount for amount in work if amount is not None]
    if len(known) < len(work):
        return "unknown"
    if _equal(known):
        return "strong"
    return "weak" if _equal([amount / count for amount, count in zip(known, gpus, strict=True)]) else "mixed"


def _equal(values: Sequence[float]) -> bool:
    return max(values) <= min(values) * (1 + ALIKE)


def series_of(groups: Sequence[Group]) -> list[Series]:
    """Return every weak and strong series of one layout among groups of runs, and at each what is in none.

    Where no layout ran on several numbers of GPUs, the fastest of each number form a series of changing layouts.
    """
    measured = [group for group in groups if _point(group) is not None]
    found: list[tuple[Series, list[Group]]] = []
    for key in (_same_layout, _same_job):
        found = found or [*_series_of_equal_work(measured, key), *_series_of_other_work(measured, key)]
    used = {id(group) for _, members in found for group in members}
    left: list[list[LeftOut]] = [[] for _ in found]
    for group in groups if found else ():
        if id(group) not in used:
            place = max(range(len(found)), key=lambda place: _likeness(group, found[place][1]))
            left[place].append(_left_out(group, found[place][1]))
    return [replace(one, left_out=tuple(out)) for (one, _), out in zip(found, left, strict=True)]


def _likeness(group: Group, members: Sequence[Group]) -> int:
    return max(sum(one == other for one, other in zip(member.kind, group.kind, strict=True)) for member in members)


def _left_out(group: Group, members: Sequence[Group]) -> LeftOut:
    why, reason = _why_left_out(group, members)
    return LeftOut(label=group.label, gpus=group.run.machine.gpus, why=why, name=short_name(group.run), reason=reason)


def short_name(run: RunRecord) -> str:
    """Return model and strategy."""
    return f"{model_name(run)} {run.strategy or layout(run)}".rstrip()


def _why_left_out(group: Group, members: Sequence[Group]) -> tuple[str, str]:
    """Say why a configuration is not a point of the series that is most like it, in full and in few words."""
    if _point(group) is None:
        return "its throughput or number of GPUs is not known", "of unknown throughput or number of GPUs"
    run, nearest = group.run, max(members, key=lambda member: _likeness(group, [member]))
    same_gpus = next((member for member in members if member.run.machine.gpus == run.machine.gpus), None)
    traits = [
        one
        for one in differing_traits(nearest.run, run)
        if one.key not in FOLLOWS_GPUS - {"strategy", "layout"} and (one.key != "layout" or _split(nearest.run) != _split(run))
    ]
    if same_gpus is not None and (_same_layout(group) == _same_layout(same_gpus) or not traits):
        return SLOWER, SLOWER
    if not traits:
        return "another number of tokens a step", "differing in tokens a step"
    reasons = 1 if run.model != nearest.run.model else MOST_REASONS
    differing = [
        f"{one.name} {one.words[1].removeprefix(f'{one.name} ')}, not {one.words[0].removeprefix(f'{one.name} ')}"
        for one in traits[:reasons]
    ]
    main = next((one for one in traits if one.effect == "refuse"), traits[0])
    return "; ".join(differing), f"differing in {main.name}"


SLOWER = "slower than the point on as many GPUs"


MOST_REASONS = 3
"""Traits that say why a configuration is in no series."""


def _split(run: RunRecord) -> tuple[object, ...]:
    return (run.ran.tensor_parallel, run.ran.pipeline_parallel, run.ran.context_parallel, run.ran.expert_parallel)


def _same_layout(group: Group) -> tuple[object, ...]:
    run = group.run
    return (*_same_job(group), run.strategy, *_split(run), run.ran.micro_batch_sequences)


def _same_job(group: Group) -> tuple[object, ...]:
    run = group.run
    shape = None if run.ran.shape is None else replace(run.ran.shape, source=None)
    work = tuple(TRAITS[key].value(run) for key in FORBIDDING if key not in FOLLOWS_GPUS)
    return (run.size, shape, accelerator_name(run), run.engine, run.ran.recompute_words, *work)


def _series_of_equal_work(groups: Sequence[Group], key: Key) -> list[tuple[Series, list[Group]]]:
    """Return series of equal work per step, or per step and GPU."""
    found = []
    for per_gpu in (True, False):
        kinds: dict[tuple[object, ...], list[Group]] = {}
        for group in groups:
            tokens, gpus = tokens_per_step(group.run), group.run.machine.gpus
            if tokens is not None and gpus is not None:
                kinds.setdefault((*key(group), tokens / gpus if per_gpu else tokens), []).append(group)
        found += [member for members in kinds.values() if (member := _series_of_fastest(members)) is not None]
    return found


def _series_of_other_work(groups: Sequence[Group], key: Key) -> list[tuple[Series, list[Group]]]:
    """Return series of unequal or unknown work, for keys without a series of equal work."""
    kinds: dict[tuple[object, ...], list[Group]] = {}
    for group in groups:
        kinds.setdefault(key(group), []).append(group)
    return [
        fastest
        for members in kinds.values()
        if not _series_of_equal_work(members, key) and (fastest := _series_of_fastest(members)) is not None
    ]


def _series_of_fastest(groups: Sequence[Group]) -> tuple[Series, list[Group]] | None:
    """Build a series from the fastest group of each number of GPUs, with these groups; None for a single number."""
    best: dict[int, tuple[Point, Group]] = {}
    for group in groups:
        point = _point(group)
        if point is not None and (point.gpus not in best or point.per_gpu > best[point.gpus][0].per_gpu):
            best[point.gpus] = (point, group)
    if len(best) < 2:
        return None
    chosen = [best[count] for count in sorted(best)]
    run = chosen[0][1].run
    name = f"{model_name(run)} on {accelerator_name(run)}, {run.strategy or 'strategy unknown'}"
    found = series(name, [point for point, _ in chosen], [tokens_per_step(group.run) for _, group in chosen])
    members = [group for _, group in chosen]
    return replace(found, differing=_differing([group.run for group in members]), on_cpu=on_cpu(members)), members


FOLLOWS_GPUS = {"gpus", "nodes", "tokens", "global-batch", "strategy", "layout"}
"""Traits that change with the number of GPUs, or that a series names anyway."""


def _differing(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    """Return each further trait in which the points of a series differ, with its values."""
    found: dict[str, dict[str, None]] = {}
    for run in runs[1:]:
        for trait in differing_traits(runs[0], run):
            if trait.key not in FOLLOWS_GPUS:
                found.setdefault(trait.name, {}).update(dict.fromkeys(trait.words))
    return tuple(f"{name} ({' | '.join(word.removeprefix(f'{name} ') for word in words)})" for name, words in found.items())


def _point(group: Group) -> Point | None:
    machine = group.run.machine
    rate = group_estimate(group, lambda metrics: metrics.tokens_per_second_per_gpu)
    if rate is None or machine.gpus is None:
        return None
    ends = [None if end is None else end * machine.gpus for end in (rate.low, rate.high)]
    runs = [item.metrics for item in group.runs if item.metrics is not None]
    total = sum((run.tokens_per_second or 0) * run.window.steps * run.mean_step_seconds for run in runs)
    return Point(
        gpus=machine.gpus,
        nodes=machine.nodes,
        tokens_per_second=Estimate(value=rate.value * machine.gpus, low=ends[0], high=ends[1], samples=rate.samples),
        tokens=total,
        layout=layout(group.run),
        runs=len(group.runs),
        rates=tuple(run_rates(group)),
        assumed_spread=assumed_spread(group),
    )


Law = Literal["Amdahl", "USL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted law of scaling, X(N) = single * N / (1 + contention * (N - 1) + coherency * N * (N - 1)).

    An interval's ends are None where there are no more points than parameters, or where the parameter sits at 0, its bound.
    """

    law: Law
    single: Estimate
    """Throughput of one GPU."""
    contention: Estimate
    """Waiting and unshared work: Amdahl's serial fraction."""
    coherency: Estimate | None
    """Cost of every pair of GPUs; None in Amdahl's law."""
    deviation: float
    """Root mean square of the relative residuals."""

    def at(self, gpus: float) -> float:
        """Return the tokens/s that the law predicts."""
        pairs = 0.0 if self.coherency is None else self.coherency.value * gpus * (gpus - 1)
        return self.single.value * gpus / (1 + self.contention.value * (gpus - 1) + pairs)

    @property
    def most_gpus(self) -> float | None:
        """Return the number of GPUs with the highest throughput; None where the law has no maximum."""
        if self.coherency is None or self.coherency.value <= 0 or self.contention.value >= 1:
            return None
        return math.sqrt((1 - self.contention.value) / self.coherency.value)


def fit(measured: Series, law: Law) -> Fit | None:
    """Fit Amdahl's law (1967) or Gunther's universal scalability law (2007, Guerrilla Capacity Planning, chapter 4).

    N / X is linear in (1, N - 1, N (N - 1)), so least squares of its relative residuals need no iteration. Parameters cannot be
    negative: one that would be is set to 0 and the others are fitted again. Intervals: Student's t on the residuals, carried
    to the ratios by the Jacobian.

    Returns:
        None where there are fewer points than parameters.
    """
    gpus = np.array([float(point.gpus) for point in measured.points])
    inverse = gpus / np.array([point.tokens_per_second.value for point in measured.points])
    terms = [np.ones_like(gpus), gpus - 1, gpus * (gpus - 1)][: 2 if law == "Amdahl" else 3]
    if len(gpus) < len(terms):
        return None
    design = np.stack(terms, axis=1) / inverse[:, None]
    free = _feasible(design)
    solution, covariance, deviation = _least_squares(design[:, free])
    first = float(solution[0])
    freedom = len(gpus) - len(free)
    single = _ratio(1.0, 1 / first, -1 / first**2 * np.eye(len(free))[0], covariance, freedom)
    parameters = []
    for column in range(1, len(terms)):
        if column not in free:
            parameters.append(Estimate(value=0.0, low=None, high=None, samples=len(gpus)))
            continue
        place = free.index(column)
        slope = np.zeros(len(free))
        slope[0], slope[place] = -solution[place] / first**2, 1 / first
        parameters.append(_ratio(float(solution[place]), 1 / first, slope, covariance, freedom))
    return Fit(
        law=law,
        single=single,
        contention=parameters[0],
        coherency=parameters[1] if law == "USL" else None,
        deviation=deviation,
    )


def _feasible(design: Array) -> list[int]:
    """Return the columns of the best fit without negative coefficients, always with the first column, one GPU's time."""
    rest = range(1, design.shape[1])
    choices = [[0, *(column for place, column in enumerate(rest) if mask >> place & 1)] for mask in range(1 << len(rest))]
    best: tuple[float, list[int]] | None = None
    for free in choices:
        solution, _, deviation = _least_squares(design[:, free])
        if (solution >= -1e-12 * abs(solution[0])).all() and (best is None or deviation < best[0] * (1 - 1e-9)):
            best = (deviation, free)
    return [0] if best is None else best[1]


def _least_squares(design: Array) -> tuple[Array, Array, float]:
    """Return the coefficients that bring each row's sum near 1, their covariance (0 without freedom), and the rms residual."""
    points, parameters = design.shape
    solution, *_ = np.linalg.lstsq(design, np.ones(points), rcond=None)
    residual = design @ solution - 1
    variance = float(residual @ residual) / max(1, points - parameters)
    covariance: Array = variance * np.linalg.pinv(design.T @ design)
    return np.asarray(solution, dtype=np.float64), covariance, math.sqrt(float(residual @ residual) / points)


def _ratio(numerator: float, inverse: float, slope: Array, covariance: Array, freedom: int) -> Estimate:
    value = numerator * inverse
    if freedom < 1:
        return Estimate(value=value, low=None, high=None, samples=freedom + len(slope))
    arm = t_quantile(freedom) * math.sqrt(float(slope @ covariance @ slope))
    return Estimate(value=value, low=value - arm, high=value + arm, samples=freedom + len(slope))
