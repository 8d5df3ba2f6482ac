"""Groups of repeated runs: what belongs together, how to label a group, and its numbers over all runs."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from tprimat.analyze.impossible import contradictions
from tprimat.analyze.metrics import MetricOptions, run_metrics, scaled
from tprimat.analyze.traits import DEFAULT_OPTIONS, LISTS, TRAITS, few, layout
from tprimat.analyze.window import tensor_memory
from tprimat.core.accelerators import find_accelerator
from tprimat.core.errors import MetricError
from tprimat.core.statistics import mean_of_runs
from tprimat.records.benchmark_file import RunResult
from tprimat.records.schema import Estimate, Finding, RunMetrics, RunRecord

Origin = Callable[[RunResult], str]
Kind = tuple[object, ...]

NO_PRICES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run with its metrics, and the reason if it does not count."""

    result: RunResult
    metrics: RunMetrics | None
    not_counted: str | None = None


def price_of(run: RunRecord, prices: Mapping[str, float]) -> float | None:
    """Return the price of one GPU hour of the run's accelerator, or None.

    `prices` are by accelerator, under its short name (H200) or any device name (NVIDIA H200 141GB HBM3e).
    """
    known = find_accelerator(run.machine.accelerator)
    for name, price in prices.items():
        if name == run.machine.accelerator or (known is not None and find_accelerator(name) is known):
            return price
    return None


def measure(result: RunResult, options: MetricOptions, prices: Mapping[str, float] = NO_PRICES) -> Measured:
    """Compute the metrics of one run. A run that must not count keeps them where they can be computed, with the reason."""
    run = result.run
    result = replace(result, steps=tuple(tensor_memory(run, result.steps)))
    reason = None
    if run.outcome == "running":
        reason = f"no end was recorded: it still runs, or was killed with its launcher; steps so far: {len(result.steps)}"
    elif run.outcome != "completed":
        reason = run.outcome + (f": {run.cause}" if run.cause else "")
    elif run.mismatches:
        reason = "what ran is not what was asked: " + "; ".join(run.mismatches)
    price = options.cost_per_gpu_hour if options.cost_per_gpu_hour is not None else price_of(run, prices)
    stated = result.stated_tokens_per_second
    chosen = replace(
        options,
        telemetry=result.telemetry,
        stated=result.stated,
        cost_per_gpu_hour=price,
        stated_tokens_per_second=stated,
    )
    try:
        metrics = run_metrics(run, result.steps, options=chosen)
    except MetricError as error:
        return Measured(result=result, metrics=None, not_counted=reason or error.what)
    if options.seed_conventions:
        result = replace(result, stated_tokens_per_second=None)  # repeating what files state is what was asked for
    if reason is None and (found := contradictions(result, metrics)):
        reason = "this cannot be: " + "; ".join(found)
    return Measured(result=result, metrics=metrics, not_counted=reason)


FEWEST_ALIKE = 5
"""Unequal step times that two runs share to the digit only if one is a copy of the other."""


def without_copies(measured: Sequence[Measured]) -> list[Measured]:
    """Leave out runs with the configuration and the step times of an earlier one: a copy repeats nothing, and shows no spread."""
    first: dict[tuple[Kind, tuple[float, ...]], RunRecord] = {}
    found = []
    for item in measured:
        seconds = tuple(step.step_seconds for step in item.result.steps)
        counts = item.not_counted is None and len(set(seconds)) >= FEWEST_ALIKE
        original = first.setdefault((kind_of(item.result, None), seconds), item.result.run) if counts else item.result.run
        copied = f"its step times equal those of {original.run_id} exactly: it is a copy"
        found.append(item if original is item.result.run else replace(item, not_counted=copied))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Repeated runs of one configuration on one kind of machine. Every run in it counts."""

    label: str
    kind: Kind
    """Origin, the value of each of TRAITS, and the file of a run that does not record what it is."""
    runs: tuple[Measured, ...]
    parts: tuple[tuple[str, str], ...] = ()
    """Key of a trait, origin or file -> its words, in the label's order; empty if the label is not a trait's."""

    @property
    def run(self) -> RunRecord:
        """The record of the first run; the others differ in time, seed and measurements only."""
        return self.runs[0].result.run


def on_cpu(groups: Iterable[Group]) -> bool:
    """Return whether every configuration ran on a CPU, which shows that it works and never how fast it is."""
    return all(group.run.machine.platform == "cpu" for group in groups)


def group_runs(measured: Sequence[Measured], origin: Origin | None = None) -> list[Group]:
    """Group the runs that count by configuration, in order of first appearance.

    Runs of different origins belong to different groups, whose labels begin with the origin's name. Without `origin` a
    configuration is one group wherever its files are.
    """
    kinds: dict[Kind, list[Measured]] = {}
    for item in measured:
        if item.not_counted is None and item.metrics is not None:
            kinds.setdefault(kind_of(item.result, origin), []).append(item)
    labels = _labels(list(kinds), 0 if origin is None else 1)
    return [
        Group(label=" ".join(words for _, words in parts), kind=kind, runs=tuple(runs), parts=parts)
        for parts, (kind, runs) in zip(labels, kinds.items(), strict=True)
    ]


def kind_of(result: RunResult, origin: Origin | None) -> Kind:
    """Return what repeated runs share: origin, traits, and the file of a run that records too little to be a repetition."""
    run = result.run
    anonymous = not (run.strategy or layout(run) or run.ran.matmul_dtype or run.engine_options)
    file = f"{result.path.parent.name}/{result.path.stem}" if anonymous else ""
    return ("" if origin is None else f"{origin(result)}:", *(trait.label(run) for trait in TRAITS.values()), file)


def labels_among(groups: Sequence[Group]) -> list[tuple[tuple[str, str], ...]]:
    """Return for each group the parts of a label that tells it from these groups alone; its own if the label is not a trait's."""
    if not all(group.parts for group in groups):
        return [group.parts for group in groups]
    return _labels([group.kind for group in groups], 1 if any(group.kind[0] for group in groups) else 0)


def _labels(kinds: Sequence[Kind], prefixes: int) -> list[tuple[tuple[str, str], ...]]:
    """Label each kind by model and accelerator, adding a further trait only where it distinguishes two groups.

    Returns:
        Key -> words of each part of each label.
    """
    names = ["origin", *TRAITS, "file"]
    shown = [*range(prefixes), names.index("model"), names.index("accelerator")]
    for index in range(1, len(names)):
        seen = [tuple(kind[i] for i in shown) for kind in kinds]
        times = Counter(seen)
        if len(times) == len(kinds):
            break
        if index not in shown and len({(short, kind[index]) for short, kind in zip(seen, kinds, strict=True)}) > len(times):
            shown.append(index)
    lists = {names.index(name) for name in LISTS}
    others = [tuple(kind[i] for i in shown if i not in lists) for kind in kinds]
    words = {i: [str(kind[i]) for kind in kinds] for i in shown}
    words |= {i: _distinctive_parts(words[i], others) for i in lists & words.keys()}
    return [tuple((names[i], words[i][place]) for i in sorted(shown) if words[i][place]) for place in range(len(kinds))]


def _distinctive_parts(lists: Sequence[str], others: Sequence[Kind]) -> list[str]:
    """Return what is rare in each list of a trait, such as 'layers=local', among lists with the same other words.

    A part that most of them have is told only where the others would not tell the lists apart, and one part where it does.
    """
    found = [""] * len(lists)
    for other in set(others):
        places = [place for place, its in enumerate(others) if its == other]
        parts = [[] if lists[place] == DEFAULT_OPTIONS else lists[place].split(", ") for place in places]
        times = Counter(part for several in parts for part in several)
        texts: list[str] = []
        for most, told in ((len(places) / 2, 1), (len(places) / 2, len(times)), (len(places) - 1, len(times))):
            texts = [few([part for part in several if times[part] <= most], told) for several in parts]
            if len(set(texts)) == len(set(map(tuple, parts))):
                break
        for place, text in zip(places, texts, strict=True):
            found[place] = text
    return found


def group_estimate(group: Group, pick: Callable[[RunMetrics], Estimate | None]) -> Estimate | None:
    """Return a number of a group: the estimate of a single run, or the mean of several with the spread between runs."""
    estimates = [pick(item.metrics) for item in group.runs if item.metrics is not None]
    present = [estimate for estimate in estimates if estimate is not None]
    if not present or len(present) < len(estimates):
        return None
    if len(present) == 1:
        return present[0]
    return scaled(mean_of_runs(np.array([estimate.value for estimate in present])), 1.0, len(present))


def group_held_back(group: Group) -> dict[str, float] | None:
    """Return what held clocks back in a group, with the share of the readings in its worst run; None where none was read."""
    found = [item.metrics.held_back for item in group.runs if item.metrics is not None and item.metrics.held_back is not None]
    reasons = {reason for one in found for reason in one}
    return {reason: max(one.get(reason, 0.0) for one in found) for reason in sorted(reasons)} if found else None


def group_mean(group: Group, pick: Callable[[RunMetrics], float | None]) -> float | None:
    """Return the mean of a plain number over the runs of a group; None where a run does not have it."""
    values = [pick(item.metrics) for item in group.runs if item.metrics is not None]
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present and len(present) == len(values) else None


def group_worst(group: Group, pick: Callable[[RunMetrics], float | None]) -> float | None:
    """Return the largest value of a number over the runs of a group; None where no run has it."""
    return max((value for item in group.runs if item.metrics is not None and (value := pick(item.metrics))), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A finding of several runs or configurations."""

    kind: str
    subjects: tuple[str, ...]
    least: tuple[float, ...]
    most: tuple[float, ...]
    """Of each number."""
    places: tuple[str, ...]
    """The runs, each as often as it has the finding; the configurations that have no MFU."""


def findings(
    groups: Iterable[Group], name: Callable[[Measured], str], more: Callable[[Measured], Sequence[Finding]] = lambda _: ()
) -> list[Shared]:
    """Return why configurations have no MFU, then what there is to know of runs; `more` are further findings of a run."""
    groups = list(groups)
    alike: dict[tuple[str, tuple[str, ...]], list[tuple[Finding, str]]] = {}
    for group in groups:
        if (metrics := group.runs[0].metrics) and metrics.mfu_absent_because:
            absent = Finding(kind="no MFU", subjects=(metrics.mfu_absent_because,))
            alike.setdefault((absent.kind, absent.subjects), []).append((absent, group.label))
    for item in (item for group in groups for item in group.runs):
        for one in (*(item.metrics.warnings if item.metrics else ()), *more(item)):
            alike.setdefault((one.kind, one.subjects), []).append((one, name(item)))
    return [
        Shared(
            kind=kind,
            subjects=subjects,
            least=tuple(map(min, zip(*(one.numbers for one, _ in several), strict=True))),
            most=tuple(map(max, zip(*(one.numbers for one, _ in several), strict=True))),
            places=tuple(place for _, place in several),
        )
        for (kind, subjects), several in alike.items()
    ]
