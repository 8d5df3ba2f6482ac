"""The published results nearest to a configuration of ours, by one yardstick, and in what they differ from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tprimat.analyze.compare import Difference
from tprimat.analyze.groups import Group, accelerator_name
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.peak import Entry, entry_of, recounted
from tprimat.facts.accelerators import find_accelerator
from tprimat.facts.published import PublishedResult, Rebased, rebase
from tprimat.facts.published_results import RESULTS
from tprimat.records.schema import RunRecord

__all__ = ["Neighbour", "Neighbourhood", "PublishedResult", "differences", "distance", "neighbourhood"]

WEIGHTS = {"model": 4.0, "accelerator": 3.0, "dtype": 3.0, "GPUs": 1.0, "sequence": 1.0, "engine": 0.5}
"""How far apart each difference makes two configurations; what is not here (batch and layout) counts OTHER each."""
OTHER = 0.25
UNKNOWN = 0.5
"""Of its weight, where a source does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A published result beside one of ours."""

    result: PublishedResult
    rebased: Rebased
    differences: tuple[Difference, ...]
    """Ours first."""
    ratio: float
    """Model FLOP/s of one of our GPUs over one of theirs, both causal. Orientation, not a verdict: see what differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhood:
    """One configuration of ours with its nearest published results, nearest first."""

    ours: Entry
    """Counted causal, against the dense peak."""
    neighbours: tuple[Neighbour, ...]


def neighbourhood(group: Group, most: int = 3, results: Sequence[PublishedResult] = RESULTS) -> Neighbourhood | None:
    """The published results most like a configuration; None where ours has no FLOP/s to set beside them, as on a CPU."""
    ours = entry_of(recounted(group, MetricOptions()))
    if ours is None or ours.flops_per_gpu is None:
        return None
    found = []
    for result in results:
        rebased = rebase(result)
        if rebased.flops_per_second_per_gpu is not None:
            ratio = ours.flops_per_gpu.value / rebased.flops_per_second_per_gpu
            apart = differences(ours.run, result)
            found.append(Neighbour(result=result, rebased=rebased, differences=apart, ratio=ratio))
    found.sort(key=lambda neighbour: distance(neighbour.differences))
    return Neighbourhood(ours=ours, neighbours=tuple(found[:most]))


def differences(run: RunRecord, result: PublishedResult) -> tuple[Difference, ...]:
    """Everything in which a published configuration is not, or is not known to be, the one that ran here."""
    theirs = find_accelerator(result.accelerator)
    pairs = (
        ("model", run.shape.name if run.shape else run.model, result.shape or result.model),
        ("accelerator", accelerator_name(run), theirs.name if theirs else result.accelerator),
        ("GPUs", run.machine.gpus, result.gpus),
        ("dtype", run.matmul_dtype, result.dtype),
        ("sequence", run.sequence_tokens, result.sequence_tokens),
        ("global batch", run.global_batch_sequences, result.global_batch_sequences),
        ("micro-batch", run.micro_batch_sequences, result.micro_batch_sequences),
        ("TP", run.tensor_parallel, result.tensor_parallel),
        ("PP", run.pipeline_parallel, result.pipeline_parallel),
        ("CP", run.context_parallel, result.context_parallel),
        ("engine", run.engine, result.engine),
    )
    return tuple(Difference(what=what, first=ours, second=other) for what, ours, other in pairs if ours != other)


def distance(found: Sequence[Difference]) -> float:
    """How unlike two configurations are: sizes by their ratio in octaves, names by their weight."""
    return sum(WEIGHTS.get(one.what, OTHER) * _apart(one) for one in found)


def _apart(one: Difference) -> float:
    if one.first is None or one.second is None:
        return UNKNOWN
    if isinstance(one.first, int) and isinstance(one.second, int):
        return abs(math.log2(one.first / one.second))
    return 1.0
