"""The published results nearest to a configuration of ours, on a common basis, and how they differ from it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tprimat.analyze.compare import rankings
from tprimat.analyze.groups import Group, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.peak import PeakEntry, entry_of
from tprimat.analyze.traits import TRAITS, accelerator_name
from tprimat.core.accelerators import find_accelerator
from tprimat.core.flops import flop_per_token
from tprimat.core.models import models
from tprimat.core.published import PublishedResult, rebase, results
from tprimat.core.rows import DATA, document
from tprimat.records.schema import RunRecord

MOST_NEIGHBORS = 3
MOST_WORKLOADS = 3
DISTANCES = {"model": 4.0, "accelerator": 3.0, "dtype": 3.0, "GPUs": 1.0, "sequence": 1.0, "engine": 0.5}
"""How far apart each difference puts two configurations, per octave where it is a size."""
OTHER_DISTANCE = 0.25
"""For the differences not listed above, batch and layout, and for models and accelerators that compute alike."""
STATED: Mapping[str, str] = document(DATA / "traits.yaml")["stated"]
"""What sources may state -> the field of a workload."""
UNSTATED = ("optimizer-states", "gradients")
"""Traits whose dtype no source states: they are differences where ours is not the usual one."""
USUAL = {None, "fp32", "float32"}
UNKNOWN_SHARE = 0.5
"""Share of its distance that a difference counts where a source does not state the value; all of it for the accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What a published configuration does not share with ours, or does not state."""

    name: str
    ours: object
    theirs: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbor:
    """A published result next to one of ours."""

    result: PublishedResult
    rebased: PublishedResult
    differences: tuple[Difference, ...]
    ratio: float
    """Model FLOP/s of one of our GPUs over one of theirs, both causal. For orientation, not a verdict: see the differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighborhood:
    """One configuration of ours with its nearest published results, nearest first."""

    ours: PeakEntry
    """Counted causal, against the dense peak."""
    neighbors: tuple[Neighbor, ...]


def nearest_published(groups: Sequence[Group]) -> list[Neighborhood]:
    """Return the published results most like the fastest configuration of each workload, without those that have no FLOP/s.

    Of the workloads with the most configurations. A CPU run has no FLOP/s, and so no neighbors.
    """
    ranked = sorted(rankings(groups), key=lambda ranking: -len(ranking.groups))
    return [one for ranking in ranked if (one := _neighborhood(ranking.best)) is not None][:MOST_WORKLOADS]


def _neighborhood(group: Group) -> Neighborhood | None:
    ours = entry_of(replace(group, runs=tuple(measure(item.result, MetricOptions()) for item in group.runs)))
    if ours is None or ours.flops_per_gpu is None:
        return None
    neighbors = []
    for result in (one for one in results() if not one.source.startswith("TPrimat")):  # whose dtype is a guess
        rebased = rebase(result)
        if rebased.flops_per_second_per_gpu is not None:
            ratio = ours.flops_per_gpu.value / rebased.flops_per_second_per_gpu
            differences = _differences(ours.run, result)
            neighbors.append(Neighbor(result=result, rebased=rebased, differences=differences, ratio=ratio))
    neighbors.sort(key=lambda neighbor: _distance(ours.run, neighbor.differences))
    return Neighborhood(ours=ours, neighbors=tuple(neighbors[:MOST_NEIGHBORS]))


def _differences(run: RunRecord, result: PublishedResult) -> tuple[Difference, ...]:
    """Return every trait in which a published configuration is not, or is not known to be, the one that ran here."""
    theirs = find_accelerator(result.accelerator)
    pairs = (
        ("model", run.ran.shape.name if run.ran.shape else run.model, result.shape or result.model),
        ("accelerator", accelerator_name(run), theirs.name if theirs else result.accelerator),
        ("GPUs", run.machine.gpus, result.gpus),
        *((name, getattr(run.ran, field), getattr(result.workload, field)) for name, field in STATED.items()),
        ("engine", run.engine, result.engine),
    )
    differences = [Difference(name=name, ours=ours, theirs=other) for name, ours, other in pairs if ours != other]
    unstated = ((trait.name, trait.value(run)) for trait in map(TRAITS.__getitem__, UNSTATED))
    differences += [Difference(name=name, ours=ours, theirs=None) for name, ours in unstated if ours not in USUAL]
    return tuple(differences)


def _distance(run: RunRecord, differences: Sequence[Difference]) -> float:
    """Return how unlike two configurations are: sizes by their ratio in octaves, names by their weight."""
    total = 0.0
    for one in differences:
        weight = OTHER_DISTANCE if _compute_alike(run, one) else DISTANCES.get(one.name, OTHER_DISTANCE)
        if isinstance(one.ours, int) and isinstance(one.theirs, int):
            weight *= abs(math.log2(one.ours / one.theirs))
        elif None in {one.ours, one.theirs} and one.name != "accelerator":
            weight *= UNKNOWN_SHARE
        total += weight
    return total


def _compute_alike(run: RunRecord, difference: Difference) -> bool:
    """Tell whether two models have layers of the same FLOP (Llama 3 and 3.1 8B do), or two accelerators the same peaks."""
    ours, theirs = run.ran.shape, models().get(str(difference.theirs))
    if difference.name == "model" and ours and theirs:
        return flop_per_token(replace(ours, layers=theirs.layers), 1) == flop_per_token(theirs, 1)
    here, there = (find_accelerator(str(name)) for name in (difference.ours, difference.theirs))
    return difference.name == "accelerator" and here is not None and there is not None and here.dense_flops == there.dense_flops
