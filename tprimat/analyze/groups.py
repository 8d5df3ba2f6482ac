"""Groups of repeated runs: what belongs together, how to label a group, and its numbers over all runs."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tprimat.analyze.impossible import contradictions
from tprimat.analyze.losses import divergence, far_above, same_training
from tprimat.analyze.metrics import MetricOptions, run_metrics, scaled
from tprimat.analyze.traits import DEFAULT_OPTIONS, LISTS, TRAITS, few, layout
from tprimat.analyze.window import tensor_memory
from tprimat.core.accelerators import find_accelerator
from tprimat.core.errors import MetricError
from tprimat.core.statistics import mean_of_runs
from tprimat.core.units import printable
from tprimat.records.benchmark_file import RunResult
from tprimat.records.schema import Estimate, Finding, RunMetrics, RunRecord

Kind = tuple[object, ...]

FILES = (".json", ".gz")
"""Suffixes of a result that is a file, which is written as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run with its metrics, and why it does not count."""

    result: RunResult
    metrics: RunMetrics | None
    not_counted: tuple[Finding, ...] = ()
    """report/words.py says it; empty where the run counts."""
    folder: str = ""
    """Among several that the user named, the end of its path that tells it apart; else empty."""

    @property
    def counts(self) -> bool:
        """Whether it belongs to a comparison."""
        return not self.not_counted


def price_of(run: RunRecord, prices: Mapping[str, float]) -> float | None:
    """Return the price of one GPU hour of the run's accelerator, or None.

    `prices` are by accelerator, under its short name (H200) or any device name (NVIDIA H200 141GB HBM3e).
    """
    known = find_accelerator(run.machine.accelerator)
    for name, price in prices.items():
        if name == run.machine.accelerator or (known is not None and find_accelerator(name) is known):
            return price
    return None


def measure(result: RunResult, options: MetricOptions, prices: Mapping[str, float] | None = None) -> Measured:
    """Compute the metrics of one run. A run that must not count keeps them where they can be computed, with the reason."""
    run = result.run
    result = replace(result, steps=tuple(tensor_memory(run, result.steps)))
    reason = _outcome(result)
    price = options.cost_per_gpu_hour if options.cost_per_gpu_hour is not None else price_of(run, prices or {})
    chosen = replace(
        options,
        telemetry=result.telemetry,
        stated=result.stated,
        cost_per_gpu_hour=price,
    )
    try:
        metrics = run_metrics(run, result.steps, options=chosen)
    except MetricError as error:
        return Measured(result=result, metrics=None, not_counted=reason or (Finding(kind="no metrics", subjects=(error.what,)),))
    if run.steps_recorded is None and run.source is None and result.path.suffix not in FILES:
        metrics = replace(metrics, warnings=(*metrics.warnings, Finding(kind="number of steps")))
    reason = (
        reason or contradictions(result, metrics) or divergence(result.steps, run.ran.shape.vocabulary if run.ran.shape else None)
    )
    return Measured(result=result, metrics=metrics, not_counted=reason)


def _outcome(result: RunResult) -> tuple[Finding, ...]:
    """Return why a run must not count by how it ended."""
    run = result.run
    if run.outcome == "running":
        return (Finding(kind="no end", numbers=(len(result.steps),)),)
    if run.outcome != "completed":
        return (Finding(kind="not completed", subjects=(run.outcome.replace("_", " "), f": {run.cause}" if run.cause else "")),)
    return tuple(Finding(kind="not as asked", subjects=(mismatch,)) for mismatch in run.mismatches)


FEWEST_ALIKE = 5
"""Unequal step times that two runs share only if one is a copy of the other."""
MOST_DECIMALS = 9
"""Of step times that a copy may have been rounded to."""


def without_copies(measured: Sequence[Measured]) -> list[Measured]:
    """Leave out copies, which repeat nothing: runs with the step times of an earlier run of their configuration."""
    earlier: dict[tuple[object, ...], list[RunResult]] = {}
    kept = []
    for item in measured:
        run, original = item.result.run, None
        if item.counts:
            alike = earlier.setdefault((run.model, run.size, run.strategy, layout(run), run.machine.gpus, run.engine), [])
            original = next((one for one in alike if _is_copy(one, item.result)), None)
            alike.append(item.result)
        copy = original and Finding(kind="copy", subjects=(original.run.run_id,))
        kept.append(replace(item, not_counted=(copy,)) if copy else item)
    return kept


def without_far_losses(measured: Sequence[Measured]) -> list[Measured]:
    """Leave out runs that learned nothing where others of the same training did: never a winner, nor a part of a mean."""
    alike: dict[Hashable, list[int]] = {}
    for place, item in enumerate(measured):
        if item.counts:
            alike.setdefault(tuple(same_training(item.result).values()), []).append(place)
    left = list(measured)
    for places in alike.values():
        for place, far in zip(places, far_above([measured[place].result for place in places]), strict=True):
            left[place] = replace(measured[place], not_counted=(far,)) if far else measured[place]
    return left


def _is_copy(one: RunResult, other: RunResult) -> bool:
    """Whether two runs have the same step times, one side perhaps rounded, in at least half of the longer run's steps."""
    first, second = ({step.step: step.step_seconds for step in result.steps} for result in (one, other))
    both = sorted(first.keys() & second.keys())
    if not both or 2 * len(both) < max(len(first), len(second)):
        return False
    times = [np.array([side[step] for step in both]) for side in (first, second)]
    pairs = ((fine.round(places), coarse) for places in range(MOST_DECIMALS + 1) for fine, coarse in (times, times[::-1]))
    alike = any(np.allclose(*pair, rtol=0, atol=10.0**-MOST_DECIMALS) for pair in pairs)
    return alike and all(len(np.unique(side)) >= FEWEST_ALIKE for side in times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Repeated runs of one configuration on one kind of machine. Every run in it counts."""

    label: str
    kind: Kind
    """Folder, the value of each of TRAITS, and the file of a run that does not record what it is."""
    runs: tuple[Measured, ...]
    parts: tuple[tuple[str, str], ...] = ()
    """Key of a trait, folder or file -> its words, in the label's order; empty if the label is not a trait's."""

    @property
    def run(self) -> RunRecord:
        """The record of the first run; the others differ in time, seed and measurements only."""
        return self.runs[0].result.run

    @property
    def folder(self) -> str:
        """The folder of its runs, among several that a user named; else empty."""
        return str(self.kind[0])


def each_once(groups: Iterable[Group]) -> dict[str, Measured]:
    """Return the runs of groups by their ids: one that a sweep gave two names, since two strategies split a model alike, once."""
    runs: dict[str, Measured] = {}
    for item in (item for group in groups for item in group.runs):
        runs.setdefault(item.result.run.run_id.removesuffix(f"-as-{item.result.run.strategy}"), item)  # by runner/run.py
    return runs


def same_runs(one: Group, other: Group) -> bool:
    """Return whether two strategies are two names of the same runs."""
    return each_once([one]).keys() == each_once([other]).keys()


def on_cpu(groups: Iterable[Group]) -> bool:
    """Return whether every configuration ran on a CPU, which shows that it works and never how fast it is."""
    return all(group.run.machine.platform == "cpu" for group in groups)


def group_runs(measured: Sequence[Measured], *, folders_first: bool = False) -> list[Group]:
    """Group the runs that count by configuration, in order of first appearance; runs of two folders are never one.

    A label names the folder only where nothing else tells two groups apart, or always (`folders_first`).
    """
    kinds: dict[Kind, list[Measured]] = {}
    for item in measured:
        if item.counts and item.metrics is not None:
            kinds.setdefault(kind_of(item), []).append(item)
    labels = _labels(list(kinds), folders_first=folders_first)
    return [
        Group(label=label_of(parts), kind=kind, runs=tuple(runs), parts=parts)
        for parts, (kind, runs) in zip(labels, kinds.items(), strict=True)
    ]


def label_of(parts: Iterable[tuple[str, str]]) -> str:
    """Return a label of its parts: 'before: llama H100 SXM'."""
    return " ".join(f"{words}:" if key == "folder" else words for key, words in parts)


def kind_of(item: Measured) -> Kind:
    """Return what repeated runs share: folder, traits, and the file of a run that records too little to be a repetition."""
    run, path = item.result.run, item.result.path
    anonymous = not (run.strategy or layout(run) or run.ran.matmul_dtype or run.engine_options)
    file = printable(f"{path.parent.name}/{path.stem}") if anonymous else ""
    return (item.folder, *(trait.label(run) for trait in TRAITS.values()), file)


def labels_among(groups: Sequence[Group]) -> list[tuple[tuple[str, str], ...]]:
    """Return for each group the parts of a label that tells it from only these groups; its own if the label is not a trait's."""
    if not all(group.parts for group in groups):
        return [group.parts for group in groups]
    first = all(group.parts[0][0] == "folder" for group in groups)
    return _labels([group.kind for group in groups], folders_first=first)


def _labels(kinds: Sequence[Kind], *, folders_first: bool) -> list[tuple[tuple[str, str], ...]]:
    """Label each kind by model and accelerator, adding a further trait only where it distinguishes two groups, last the folder.

    A label's parts are keys with their words.
    """
    names = ["folder", *TRAITS, "file"]
    shown = [*range(folders_first), names.index("model"), names.index("accelerator")]
    for index in (*range(1, len(names)), 0):
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
    labels = [""] * len(lists)
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
            labels[place] = text
    return labels


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
    shares = [item.metrics.held_back for item in group.runs if item.metrics is not None and item.metrics.held_back is not None]
    reasons = {reason for one in shares for reason in one}
    return {reason: max(one.get(reason, 0.0) for one in shares) for reason in sorted(reasons)} if shares else None


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
        metrics = group.runs[0].metrics
        absent = metrics.mfu_absent_because if metrics and not on_cpu([group]) else None  # on a CPU, the caution says more
        if absent:
            alike.setdefault((absent.kind, absent.subjects), []).append((absent, group.label))
    for item in each_once(groups).values():
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
