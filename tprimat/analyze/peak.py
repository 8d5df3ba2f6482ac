"""Find the fastest configuration of each machine and model, and project its throughput to a day and to more nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tprimat.analyze.compare import Question, Ranking, Verdict, rankings, throughput, verdict
from tprimat.analyze.groups import Group, Measured, group_estimate, group_runs, on_cpu
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.traits import layout, machine_name, model_and_shape
from tprimat.core.statistics import mean_of_runs
from tprimat.records.schema import Estimate, RunRecord

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakEntry:
    """One configuration with the figures that rank it; the other metrics are its group's."""

    group: Group
    run: RunRecord
    """Of its first run."""
    gpus: int
    platform: str
    """The machine, such as 8 x H100 SXM."""
    model: str
    """With its size unless it is the full one, and with its shape unless it is the usual one."""
    configuration: str
    """Strategy and layout."""
    steps: int
    """Steady steps behind the figures."""
    per_gpu: Estimate
    """Tokens/s of one GPU."""
    tokens_per_second: float
    """Of all GPUs, like the model FLOP/s."""
    flops: float | None
    flops_per_gpu: Estimate | None
    """Model FLOP/s of one GPU; None on a CPU, where toy models make them meaningless, and where FLOP cannot be counted."""
    utilization: Estimate | None
    peak_flops: float | None
    """FLOP/s of one GPU that utilization is a share of."""
    mean_step: Estimate
    """Seconds."""

    @property
    def tokens_per_day(self) -> float:
        """Return the tokens of a day without a pause."""
        return self.tokens_per_second * SECONDS_PER_DAY

    @property
    def samples_per_day(self) -> float | None:
        """Return the sequences of a day; None where their length is not recorded."""
        return None if self.run.ran.sequence_tokens is None else self.tokens_per_day / self.run.ran.sequence_tokens


def entry_of(group: Group) -> PeakEntry | None:
    """Compute the figures of one configuration; None without a throughput, where tokens or GPUs are not recorded."""
    run, gpus, per_gpu = group.run, group.run.machine.gpus, throughput(group)
    metrics = [item.metrics for item in group.runs if item.metrics is not None]
    if per_gpu is None or gpus is None:
        return None
    flops = None if on_cpu([group]) else group_estimate(group, lambda one: one.model_flops_per_second_per_gpu)
    seconds = mean_of_runs(np.array([one.mean_step_seconds for one in metrics])).value
    low, high = (None if end is None else seconds * per_gpu.value / end for end in (per_gpu.high, per_gpu.low))  # the inverse
    return PeakEntry(
        group=group,
        run=run,
        gpus=gpus,
        platform=machine_name(run),
        model=model_and_shape(run),
        configuration=f"{run.strategy or 'strategy unknown'} {layout(run)}".rstrip(),
        steps=sum(one.window.steps for one in metrics),
        per_gpu=per_gpu,
        tokens_per_second=per_gpu.value * gpus,
        flops=None if flops is None else flops.value * gpus,
        flops_per_gpu=flops,
        utilization=group_estimate(group, lambda one: one.mfu),
        peak_flops=metrics[0].peak_dense_flops,
        mean_step=Estimate(value=seconds, low=low, high=high, samples=per_gpu.samples),
    )


def peaks(entries: Sequence[PeakEntry]) -> list[PeakEntry]:
    """Return the best configuration of each machine and model: the fastest; of unlike work, that with the most FLOP/s first."""
    places: dict[tuple[str, str], list[PeakEntry]] = {}
    for entry in entries:
        places.setdefault((entry.platform, entry.model), []).append(entry)
    return by_flops([by_flops(alike)[0] for alike in places.values()])


def by_flops(entries: Sequence[PeakEntry]) -> list[PeakEntry]:
    """Sort by FLOP/s, which unlike work may be ranked by; by tokens/s where one does not know its FLOP/s."""
    if all(entry.flops is not None for entry in entries):
        return sorted(entries, key=lambda entry: -(entry.flops or 0))
    return sorted(entries, key=lambda entry: -entry.tokens_per_second)


def best_of_models(best: Sequence[PeakEntry]) -> list[PeakEntry]:
    """Return the first peak of each model: tokens/s of different models do not compare."""
    fastest: dict[str, PeakEntry] = {}
    for entry in best:
        fastest.setdefault(entry.model, entry)
    return list(fastest.values())


def against_the_best(best: Sequence[PeakEntry], *, even_if_different: bool = False) -> list[Verdict]:
    """Compare, for each model that ran on several machines, the peak of every other machine with the fastest one."""
    leaders: dict[str, PeakEntry] = {}
    verdicts = []
    for entry in best:
        leader = leaders.setdefault(entry.model, entry)
        if leader is not entry:
            verdicts.append(verdict(entry.group, leader.group, Question(even_if_different=even_if_different)))
    return verdicts


def project(entry: PeakEntry, nodes: Sequence[int], efficiency: float) -> list[dict[str, float]]:
    """Project throughput to more nodes: linearly, and at an assumed efficiency (0..1) beyond the measured number of nodes."""
    measured = entry.run.machine.nodes or 1
    return [
        {
            "nodes": count,
            "gpus": entry.gpus // measured * count,
            "linear_tokens_per_second": entry.tokens_per_second / measured * count,
            "tokens_per_second": entry.tokens_per_second / measured * count * (efficiency if count > measured else 1.0),
            "efficiency": efficiency,
        }
        for count in nodes
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakAnalysis:
    """The results of one analysis; without entries where no run counts."""

    options: MetricOptions
    """How FLOP were counted, and which peak they were divided by."""
    entries: Sequence[PeakEntry]
    """Fastest first."""
    rankings: Sequence[Ranking]
    """Of the entries, by their work."""
    peaks: Sequence[PeakEntry]
    verdicts: Sequence[Verdict]
    projections: Sequence[dict[str, float]]
    """Of the overall peak; not measured."""
    efficiency: float
    without_rate: Sequence[str]
    """Configurations that ran but have no throughput."""
    not_counted: Sequence[Measured]


def analyze_peaks(
    measured: Sequence[Measured],
    options: MetricOptions,
    *,
    nodes: Sequence[int] = (1,),
    efficiency: float = 1.0,
    even_if_different: bool = False,
) -> PeakAnalysis:
    """Find the peaks, and project the overall one to more nodes at an efficiency (0..1)."""
    groups = group_runs(measured)
    # One that ran several times ranks by its mean.
    entries = sorted(filter(None, map(entry_of, groups)), key=lambda entry: -entry.tokens_per_second)
    best = peaks(entries)
    ranked = {id(entry.group) for entry in entries}
    return PeakAnalysis(
        options=options,
        entries=entries,
        rankings=rankings([entry.group for entry in entries]),
        peaks=best,
        verdicts=against_the_best(best, even_if_different=even_if_different),
        projections=project(best[0], nodes, efficiency) if best and not on_cpu([best[0].group]) else (),
        efficiency=efficiency,
        without_rate=[group.label for group in groups if id(group) not in ranked],
        not_counted=[item for item in measured if not item.counts],
    )
