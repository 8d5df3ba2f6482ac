"""Scaling of throughput with GPUs: multiplier, efficiency, and the share of the work that more GPUs do not shorten.

Weak scaling gives every GPU the same work and grows the batch; strong scaling divides one batch. The tokens of
a step decide; where they follow neither there is no series, because its efficiency would mix two causes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from tprimat.analyze.compare import assumed_spread, run_rates
from tprimat.analyze.groups import Group, group_estimate, on_cpu
from tprimat.analyze.metrics import scaled
from tprimat.analyze.traits import FORBIDDING, TRAITS, accelerator_name, differing_traits, layout, model_name, tokens_per_step
from tprimat.core.statistics import BETWEEN_RUNS, Rate, ratio_of_rates, t_quantile
from tprimat.records.schema import Estimate, Finding, RunRecord

ScalingKind = Literal["weak", "strong"]

FOLLOWS_GPUS = {"gpus", "nodes", "tokens", "global-batch", "strategy", "layout"}
"""Traits that change with the number of GPUs, or that a series names anyway."""
NAMED_ONLY = {*FOLLOWS_GPUS, "power-limit"}
"""Those, and one whose difference between points is told with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The measurement on one number of GPUs."""

    gpus: int
    nodes: int | None
    tokens_per_second: Estimate
    """Throughput of all GPUs."""
    tokens: float
    """In total."""
    layout: str = ""
    runs: int = 1
    rates: tuple[Rate, ...] = ()
    """Tokens/s of one GPU in each run."""
    assumed_spread: float = BETWEEN_RUNS
    """Relative standard deviation between runs, where there is one run."""

    @property
    def per_gpu(self) -> float:
        """Return the tokens/s of one GPU."""
        return self.tokens_per_second.value / self.gpus

    @property
    def seconds(self) -> float:
        """Return the elapsed time for the tokens."""
        return self.tokens / self.tokens_per_second.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A point relative to the smallest one of its series."""

    point: Point
    multiplier: Estimate
    """Throughput over that of the smallest."""
    efficiency: Estimate
    """Throughput per GPU over that of the smallest; of the smallest itself without an interval."""


LeftOut = tuple[str, int | None, Finding]
"""A configuration that was measured, and is a point of no series: its name, its GPUs, and why."""
NO_POINT = Finding(kind="no point")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One workload on rising numbers of GPUs."""

    name: str
    kind: ScalingKind
    points: tuple[Point, ...]
    """By number of GPUs, each number once, two or more."""
    differing: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further trait in which the points differ -> its values."""
    left_out: tuple[LeftOut, ...] = ()
    """Configurations that are in no series, at the first one."""
    on_cpu: bool = False
    """Its GPUs are processes, which share one CPU."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return the multiplier and efficiency of each point."""
        return tuple(_row(self.points[0], point) for point in self.points)


def _row(first: Point, point: Point) -> Row:
    efficiency = Estimate(value=point.per_gpu / first.per_gpu, low=None, high=None, samples=1)
    if point is not first and first.rates and point.rates:
        spread = max(first.assumed_spread, point.assumed_spread)
        ratio = ratio_of_rates(first.rates, point.rates, assumed=spread)
        efficiency = replace(efficiency, low=ratio.low, high=ratio.high, samples=len(first.rates) + len(point.rates))
    return Row(point=point, multiplier=scaled(efficiency, point.gpus / first.gpus, efficiency.samples), efficiency=efficiency)


def series_of(groups: Sequence[Group]) -> list[Series]:
    """Return every weak and strong series of one layout among groups of runs; the first says what is a point of none."""
    made = _series_by(groups)
    used = {id(group) for _, members in made for group in members}
    left = tuple(
        (f"{model_name(group.run)} {group.run.strategy or layout(group.run)}".rstrip(), group.run.machine.gpus, NO_POINT)
        for group in groups
        if id(group) not in used
    )
    names, keys = [one.name for one, _ in made], ("engine", *(key for key in TRAITS if key not in NAMED_ONLY))
    told = [[TRAITS[key].label(members[0].run) for _, members in made] for key in keys]
    for words in ([f"{one.kind} scaling" for one, _ in made], *told):  # what tells apart those of one name
        pairs = list(zip(names, words, strict=True))
        names = [f"{name}, {word}" if len({other for same, other in pairs if same == name}) > 1 else name for name, word in pairs]
    return [replace(one, name=names[place], left_out=left * (place == 0)) for place, (one, _) in enumerate(made)]


def _key(group: Group) -> tuple[object, ...]:
    """Return what the points of a series share besides their work: job and layout, without the number of replicas."""
    run = group.run
    shape = None if run.ran.shape is None else replace(run.ran.shape, source=None)
    work = tuple(TRAITS[key].value(run) for key in FORBIDDING if key not in NAMED_ONLY)
    job = (run.size, shape, accelerator_name(run), run.engine, run.ran.recompute_words, *work)
    split = (run.ran.tensor_parallel, run.ran.pipeline_parallel, run.ran.context_parallel, run.ran.expert_parallel)
    return (*job, run.strategy, *split, run.ran.micro_batch_sequences)


def _series_by(groups: Sequence[Group]) -> list[tuple[Series, list[Group]]]:
    """Return series of equal keys and equal work per step and GPU, then per step."""
    all_series: list[tuple[Series, list[Group]]] = []
    for kind in get_args(ScalingKind):
        alike: dict[tuple[object, ...], list[Group]] = {}
        for group in groups:
            tokens, parts = tokens_per_step(group.run), group.run.machine.gpus if kind == "weak" else 1
            if tokens is not None and parts is not None:
                alike.setdefault((*_key(group), tokens / parts), []).append(group)
        all_series += filter(None, (_series_of_fastest(kind, members) for members in alike.values()))
    return all_series


def _series_of_fastest(kind: ScalingKind, groups: Sequence[Group]) -> tuple[Series, list[Group]] | None:
    """Build a series from the fastest group of each number of GPUs, with these groups; None for a single number."""
    best: dict[int, tuple[Point, Group]] = {}
    for group in groups:
        point = _point(group)
        if point is not None and (point.gpus not in best or point.per_gpu > best[point.gpus][0].per_gpu):
            best[point.gpus] = (point, group)
    if len(best) < 2:
        return None
    members = [best[count][1] for count in sorted(best)]
    run = members[0].run
    name = f"{model_name(run)} on {accelerator_name(run)}, {run.strategy or 'strategy unknown'}"
    points, differing = tuple(best[count][0] for count in sorted(best)), _differing([group.run for group in members])
    return Series(name=name, kind=kind, points=points, differing=differing, on_cpu=on_cpu(members)), members


def _differing(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Return each further trait in which the points of a series differ, with its values."""
    values: dict[str, list[str]] = {}
    for run in runs[1:]:
        for trait in differing_traits(runs[0], run):
            if trait.key not in FOLLOWS_GPUS:
                values.setdefault(trait.name, []).extend(trait.words)
    return values


def _point(group: Group) -> Point | None:
    machine = group.run.machine
    rate = group_estimate(group, lambda metrics: metrics.tokens_per_second_per_gpu)
    if rate is None or machine.gpus is None:
        return None
    runs = [item.metrics for item in group.runs if item.metrics is not None]
    return Point(
        gpus=machine.gpus,
        nodes=machine.nodes,
        tokens_per_second=scaled(rate, machine.gpus, rate.samples),
        tokens=sum((run.tokens_per_second or 0) * run.window.steps * run.mean_step_seconds for run in runs),
        layout=layout(group.run),
        runs=len(group.runs),
        rates=tuple(run_rates(group)),
        assumed_spread=assumed_spread(group),
    )


def serial_share(measured: Series) -> Estimate:
    """Fit Amdahl's law (1967), X(N) = X(1) N / (1 + s (N - 1)), and return s, the share of the work that GPUs do not share.

    Least squares of the relative residuals of the throughput X. The interval is Student's t; its ends are None for two points.
    """
    gpus = np.array([float(point.gpus) for point in measured.points])
    inverse = gpus / np.array([point.tokens_per_second.value for point in measured.points])
    design = np.stack([np.ones_like(gpus), gpus - 1], axis=1) / inverse[:, None]
    (one, more), *_ = np.linalg.lstsq(design, np.ones(len(gpus)), rcond=None)
    share, freedom = float(more / one), len(gpus) - 2
    if not freedom:
        return Estimate(value=share, low=None, high=None, samples=len(gpus))
    residual, slope = design @ (one, more) - 1, np.array([-share, 1.0]) / one
    arm = t_quantile(freedom) * float(np.sqrt(residual @ residual / freedom * (slope @ np.linalg.inv(design.T @ design) @ slope)))
    return Estimate(value=share, low=share - arm, high=share + arm, samples=len(gpus))
