"""Find the fastest configuration of each machine and model, and project its throughput to a day and to more nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tprimat.analyze.compare import Question, Verdict, comparable, verdict
from tprimat.analyze.groups import Group, Measured, group_estimate, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.traits import (
    DifferingTrait,
    dtype_that_ran,
    layout,
    machine_name,
    model_and_shape,
    routing_words,
    tokens_per_step,
    work_words,
)
from tprimat.analyze.window import Warmup
from tprimat.core.statistics import mean_of_runs
from tprimat.records.evidence import grade_of
from tprimat.records.schema import Estimate, RunMetrics, RunRecord

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One configuration with the figures that rank it; the other metrics are its group's."""

    group: Group
    gpus: int
    per_gpu: Estimate
    """Tokens/s of one GPU."""
    flops_per_gpu: Estimate | None
    """Model FLOP/s of one GPU; None on a CPU, where toy models make them meaningless, and where FLOP cannot be counted."""
    utilization: Estimate | None
    utilization_absent_because: str | None
    peak_flops: float | None
    """FLOP/s of one GPU that utilization is a share of."""
    mean_step: Estimate
    """Seconds."""

    @property
    def tokens_per_second(self) -> float:
        """Return the throughput of all GPUs."""
        return self.per_gpu.value * self.gpus

    @property
    def flops(self) -> float | None:
        """Return the model FLOP/s of all GPUs."""
        return None if self.flops_per_gpu is None else self.flops_per_gpu.value * self.gpus

    @property
    def run(self) -> RunRecord:
        """Return the record of the configuration's first run."""
        return self.group.run

    @property
    def platform(self) -> str:
        """Return the machine, such as 8 x H100 SXM."""
        return machine_name(self.run)

    @property
    def model(self) -> str:
        """Return the model's key, with its size unless it is the full one, and with its shape unless it is the usual one."""
        return model_and_shape(self.run)

    @property
    def configuration(self) -> str:
        """Return strategy and layout."""
        return f"{self.run.strategy or 'strategy unknown'} {layout(self.run)}".rstrip()

    @property
    def steps(self) -> int:
        """Return the number of steady steps behind the figures."""
        return sum(item.metrics.window.steps for item in self.group.runs if item.metrics)

    @property
    def tokens_per_day(self) -> float:
        """Return the tokens of a day without a pause."""
        return self.tokens_per_second * SECONDS_PER_DAY

    @property
    def samples_per_day(self) -> float | None:
        """Return the sequences of a day; None where their length is not recorded."""
        return None if self.run.ran.sequence_tokens is None else self.tokens_per_day / self.run.ran.sequence_tokens


def entry_of(group: Group) -> Entry | None:
    """Compute the figures of one configuration; None without a throughput, where tokens or GPUs are not recorded."""
    per_gpu = group_estimate(group, lambda metrics: metrics.tokens_per_second_per_gpu)
    gpus = group.run.machine.gpus
    metrics = [item.metrics for item in group.runs if item.metrics is not None]
    if per_gpu is None or gpus is None:
        return None
    on_cpu = group.run.machine.platform == "cpu"
    return Entry(
        group=group,
        gpus=gpus,
        per_gpu=per_gpu,
        flops_per_gpu=None if on_cpu else group_estimate(group, lambda found: found.model_flops_per_second_per_gpu),
        utilization=group_estimate(group, lambda found: found.mfu),
        utilization_absent_because=metrics[0].mfu_absent_because,
        peak_flops=metrics[0].peak_dense_flops,
        mean_step=_mean_step(metrics, per_gpu),
    )


def _mean_step(metrics: Sequence[RunMetrics], rate: Estimate) -> Estimate:
    """Return the mean step time with the interval of the throughput, of which it is the inverse."""
    seconds = mean_of_runs(np.array([found.mean_step_seconds for found in metrics])).value
    low, high = (None if end is None else seconds * rate.value / end for end in (rate.high, rate.low))
    return Estimate(value=seconds, low=low, high=high, samples=rate.samples)


def ranked_entries(groups: Sequence[Group]) -> list[Entry]:
    """Return all configurations with a throughput, fastest first. One that ran several times ranks by its mean."""
    entries = [entry for group in groups if (entry := entry_of(group)) is not None]
    return sorted(entries, key=lambda entry: -entry.tokens_per_second)


def peaks(entries: Sequence[Entry]) -> list[Entry]:
    """Return the best configuration of each machine and model: the fastest; of unlike work, that with the most FLOP/s first."""
    places: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        places.setdefault((entry.platform, entry.model), []).append(entry)
    return by_flops([by_flops(alike)[0] for alike in places.values()])


def by_flops(entries: Sequence[Entry]) -> list[Entry]:
    """Sort by FLOP/s, which unlike work may be ranked by; by tokens/s where one does not know its FLOP/s."""
    if all(entry.flops is not None for entry in entries):
        return sorted(entries, key=lambda entry: -(entry.flops or 0))
    return sorted(entries, key=lambda entry: -entry.tokens_per_second)


def best_of_models(best: Sequence[Entry]) -> list[Entry]:
    """Return the first peak of each model: tokens/s of different models do not compare."""
    found: dict[str, Entry] = {}
    for entry in best:
        found.setdefault(entry.model, entry)
    return list(found.values())


def unlike(entry: Entry, entries: Sequence[Entry]) -> list[tuple[DifferingTrait, ...]]:
    """Return what forbids comparing a configuration with others of its model, for each that did other work."""
    likes = (other for other in entries if other.model == entry.model and other is not entry)
    return [found for other in likes if (found := comparable(entry.run, other.run))]


def against_the_best(best: Sequence[Entry], *, even_if_different: bool = False) -> list[Verdict]:
    """Compare, for each model that ran on several machines, the peak of every other machine with the fastest one."""
    leaders: dict[str, Entry] = {}
    verdicts = []
    for entry in best:
        leader = leaders.setdefault(entry.model, entry)
        if leader is not entry:
            verdicts.append(verdict(entry.group, leader.group, Question(even_if_different=even_if_different)))
    return verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Throughput of more nodes if they worked like the measured ones. Not a measurement."""

    nodes: int
    gpus: int
    linear_tokens_per_second: float
    tokens_per_second: float
    """At the assumed efficiency."""
    linear_flops: float | None


def project(entry: Entry, nodes: Sequence[int], efficiency: float) -> list[Projection]:
    """Project throughput to more nodes: linearly, and at an assumed efficiency (0..1) beyond the measured number of nodes."""
    measured = entry.run.machine.nodes or 1
    return [
        Projection(
            nodes=count,
            gpus=entry.gpus // measured * count,
            linear_tokens_per_second=entry.tokens_per_second / measured * count,
            tokens_per_second=entry.tokens_per_second / measured * count * (efficiency if count > measured else 1.0),
            linear_flops=None if entry.flops is None else entry.flops / measured * count,
        )
        for count in nodes
    ]


CONVENTIONS = {
    "causal, dense peak": MetricOptions(flops_convention="causal"),
    "full, dense peak": MetricOptions(flops_convention="full"),
    "6n, dense peak": MetricOptions(flops_convention="6n"),
    "6n, sparse peak": MetricOptions(flops_convention="6n", peak="sparse"),
    "first TPrimat": MetricOptions(seed_conventions=True),
}
"""Every way of counting FLOP and peaks, by name."""


def by_convention(entry: Entry, warmup: Warmup = "auto") -> dict[str, Entry]:
    """Count the same runs by every convention, under its name."""
    counted = {name: entry_of(recounted(entry.group, replace(options, warmup=warmup))) for name, options in CONVENTIONS.items()}
    return {name: one for name, one in counted.items() if one is not None}


def recounted(group: Group, options: MetricOptions) -> Group:
    """Measure a group again by other options."""
    runs: list[Measured] = [measure(item.result, options) for item in group.runs]
    return replace(group, runs=tuple(runs))


def remarks(best: Sequence[Entry]) -> list[str]:
    """Return notes on the peaks: different workloads behind them, and dtypes that are not observed."""
    believed = [f"{entry.model} on {entry.platform}" for entry in best if grade_of(entry.run, "matmul_dtype") == "stated"]
    stated = [f"The dtype is stated, not observed: {', '.join(believed)}."] if believed else []
    return unlike_workloads(best) + stated


def other_work(entries: Sequence[Entry], best: Sequence[Entry]) -> list[str]:
    """Name what else ran on the machine of a peak with its model, and did other work: no rank among them says which is faster."""
    notes = []
    for entry in best:
        place = (entry.platform, entry.model)
        likes = [other for other in entries if (other.platform, other.model) == place]
        apart = unlike(entry, likes)
        if apart:
            fields = ", ".join(dict.fromkeys(one.name for found in apart for one in found))
            count = f"{len(apart)} other configuration{'s' * (len(apart) > 1)}"
            notes.append(f"{entry.model} on {entry.platform}: {count} did other work than the peak ({fields}).")
    return notes


def unlike_workloads(best: Sequence[Entry]) -> list[str]:
    """Return, for each model, the workloads behind its peaks where they differ."""
    notes = []
    for model in dict.fromkeys(entry.model for entry in best):
        same = [entry for entry in best if entry.model == model]
        workloads = {(tokens_per_step(entry.run), entry.run.ran.sequence_tokens, dtype_that_ran(entry.run)) for entry in same}
        if len(workloads) > 1:
            each = "; ".join(f"{entry.platform} {workload(entry.run)}" for entry in same)
            notes.append(f"The peaks of {model} come from different work: {each}.")
    return notes


def workload(run: RunRecord) -> str:
    """Describe what one step works on."""
    return ", ".join(filter(None, (*work_words(run), routing_words(run))))
