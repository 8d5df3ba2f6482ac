"""The fastest configuration of each machine and model, and what its throughput makes in a day and on more nodes."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tprimat.analyze.compare import Verdict, verdict
from tprimat.analyze.groups import (
    Group,
    Measured,
    group_estimate,
    layout,
    machine_name,
    measure,
    tokens_per_step,
)
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.window import Warmup
from tprimat.records.legacy import MODELS as USUAL_SHAPES
from tprimat.records.metrics import Estimate
from tprimat.records.schema import RunRecord

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One configuration with the figures that a ranking needs."""

    group: Group
    gpus: int
    per_gpu: Estimate
    """Tokens/s."""
    flops_per_gpu: Estimate | None
    """Model FLOP/s; None on a CPU, where toy models make them meaningless, and where the FLOP cannot be counted."""
    utilization: Estimate | None
    utilization_absent_because: str | None
    peak_flops: float | None
    """Of one GPU: what utilization divides by."""
    mean_step_seconds: float
    share_of_measured_gemm: float | None
    measured_gemm_flops: float | None
    peak_memory_bytes: int | None
    cost_per_million_tokens: float | None
    joules_per_token: float | None

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.per_gpu.value * self.gpus

    @property
    def flops(self) -> float | None:
        """Of all GPUs."""
        return None if self.flops_per_gpu is None else self.flops_per_gpu.value * self.gpus

    @property
    def run(self) -> RunRecord:
        """The record of the configuration's first run."""
        return self.group.run

    @property
    def platform(self) -> str:
        """8 x H100 SXM."""
        return machine_name(self.run)

    @property
    def model(self) -> str:
        """Key of the model; with its size where that is not the full one, with the shape's name where another took its place."""
        run = self.run
        if run.size != "full":
            return f"{run.model} {run.size}"
        usual = USUAL_SHAPES.get(run.model)
        return run.model if run.shape is None or usual in {None, run.shape.name} else f"{run.model} ({run.shape.name})"

    @property
    def configuration(self) -> str:
        """Strategy and layout, without context and expert degrees of 1."""
        return re.sub(r" (CP|EP)1\b", "", f"{self.run.strategy or 'strategy unknown'} {layout(self.run)}".rstrip())

    @property
    def steps(self) -> int:
        """Steady steps behind the figures."""
        return sum(item.metrics.window.steps for item in self.group.runs if item.metrics)

    @property
    def tokens_per_day(self) -> float:
        """At this rate without a pause."""
        return self.tokens_per_second * SECONDS_PER_DAY

    @property
    def samples_per_day(self) -> float | None:
        """Sequences; None where their length is not recorded."""
        return None if self.run.sequence_tokens is None else self.tokens_per_day / self.run.sequence_tokens


def entry_of(group: Group) -> Entry | None:
    """The figures of one configuration; None where tokens or GPUs are not recorded, so that it has no throughput."""
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
        mean_step_seconds=sum(found.mean_step_seconds for found in metrics) / len(metrics),
        share_of_measured_gemm=_mean([found.share_of_measured_gemm for found in metrics]),
        measured_gemm_flops=_mean([found.measured_gemm_flops for found in metrics]),
        peak_memory_bytes=max((found.peak_memory_bytes for found in metrics if found.peak_memory_bytes), default=None),
        cost_per_million_tokens=_mean([found.cost_per_million_tokens for found in metrics]),
        joules_per_token=_mean([found.joules_per_token for found in metrics]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(values) if present and len(present) == len(values) else None


def ranked_entries(groups: Sequence[Group]) -> list[Entry]:
    """All configurations with a throughput, fastest first. A configuration that ran several times ranks by its mean."""
    found = [made for group in groups if (made := entry_of(group)) is not None]
    return sorted(found, key=lambda made: -made.tokens_per_second)


def peaks(entries: Sequence[Entry]) -> list[Entry]:
    """The fastest configuration of each machine and model, fastest first."""
    best: dict[tuple[str, str], Entry] = {}
    for made in entries:
        best.setdefault((made.platform, made.model), made)
    return list(best.values())


def configuration_names(entries: Sequence[Entry]) -> list[str]:
    """What to call each configuration: strategy and layout, and where these are alike, the settings in which they differ."""
    alike: dict[tuple[str, str, str], list[Entry]] = {}
    for made in entries:
        alike.setdefault((made.platform, made.model, made.configuration), []).append(made)
    called = {
        id(made): [made.configuration, *words]
        for same in alike.values()
        for made, words in zip(same, _distinguishing_settings(same), strict=True)
    }
    return [" ".join(called[id(made)]) for made in entries]


def _distinguishing_settings(alike: Sequence[Entry]) -> list[list[str]]:
    """What tells like-named configurations apart: their own figures, and the switches that most of the others set otherwise."""
    figures = [_settings(made.run) for made in alike]
    differing = [key for key in figures[0] if len({repr(one[key]) for one in figures}) > 1]
    switches = {
        key: Counter(repr(made.run.engine_options.get(key)) for made in alike).most_common(1)[0][0]
        for key in sorted({key for made in alike for key in made.run.engine_options})
    }
    return [
        [f"{key}={one[key]}" for key in differing]
        + [f"{key}={options.get(key)}" for key, usual in switches.items() if repr(options.get(key)) != usual]
        for one, options in zip(figures, (made.run.engine_options for made in alike), strict=True)
    ]


def _settings(run: RunRecord) -> dict[str, object]:
    return {
        "engine": run.engine,
        "dtype": run.matmul_dtype,
        "sequence": run.sequence_tokens,
        "GBS": run.global_batch_sequences,
        "MBS": run.micro_batch_sequences,
        "recompute": run.recompute,
    }


def against_the_best(found: Sequence[Entry], *, even_if_different: bool = False) -> list[Verdict]:
    """For each model that ran on several machines: every other machine's peak against the fastest, or why that says nothing."""
    leaders: dict[str, Entry] = {}
    verdicts = []
    for made in found:
        leader = leaders.setdefault(made.model, made)
        if leader is not made:
            verdicts.append(verdict(made.group, leader.group, even_if_different=even_if_different))
    return verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """What more nodes would make if they worked like the measured ones. Not a measurement."""

    nodes: int
    gpus: int
    linear_tokens_per_second: float
    tokens_per_second: float
    """At the assumed efficiency."""
    linear_flops: float | None


def project(made: Entry, nodes: Sequence[int], efficiency: float) -> list[Projection]:
    """Throughput over nodes: proportional, and with a share lost as soon as more nodes work together than were measured.

    Args:
        made: what was measured.
        nodes: how many machines.
        efficiency: of every count above the measured one, 0..1.
    """
    measured = made.run.machine.nodes or 1
    return [
        Projection(
            nodes=count,
            gpus=made.gpus // measured * count,
            linear_tokens_per_second=made.tokens_per_second / measured * count,
            tokens_per_second=made.tokens_per_second / measured * count * (efficiency if count > measured else 1.0),
            linear_flops=None if made.flops is None else made.flops / measured * count,
        )
        for count in nodes
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """One way in which people count."""

    name: str
    options: MetricOptions


CONVENTIONS = (
    Convention(name="causal, dense peak", options=MetricOptions(flops_convention="causal")),
    Convention(name="full, dense peak", options=MetricOptions(flops_convention="full")),
    Convention(name="6n, dense peak", options=MetricOptions(flops_convention="6n")),
    Convention(name="6n, sparse peak", options=MetricOptions(flops_convention="6n", peak="sparse")),
    Convention(name="first TPrimat", options=MetricOptions(seed_conventions=True)),
)


def by_convention(made: Entry, warmup: Warmup = "auto") -> dict[str, Entry]:
    """The same runs counted in every way, by the yardstick's name."""
    found = {}
    for yardstick in CONVENTIONS:
        counted = entry_of(recounted(made.group, replace(yardstick.options, warmup=warmup)))
        if counted is not None:
            found[yardstick.name] = counted
    return found


def recounted(group: Group, options: MetricOptions) -> Group:
    """A group with its metrics by other options."""
    runs: list[Measured] = [measure(item.result, options) for item in group.runs]
    return replace(group, runs=tuple(runs))


def remarks(found: Sequence[Entry]) -> list[str]:
    """What a reader must know of the peaks: unlike work behind them, and the warnings of their runs, each said once."""
    places: dict[str, dict[str, None]] = {}
    for made in found:
        for warning in (warning for item in made.group.runs if item.metrics for warning in item.metrics.warnings):
            places.setdefault(warning, {})[f"{made.model} on {made.platform}"] = None
    return unlike_workloads(found) + [f"{warning} ({', '.join(where)})" for warning, where in places.items()]


def unlike_workloads(found: Sequence[Entry]) -> list[str]:
    """For each model, the workloads behind its peaks where they are not one."""
    notes = []
    for model in dict.fromkeys(made.model for made in found):
        same = [made for made in found if made.model == model]
        workloads = {(tokens_per_step(made.run), made.run.sequence_tokens, made.run.matmul_dtype) for made in same}
        if len(workloads) > 1:
            each = "; ".join(f"{made.platform} {workload(made.run)}" for made in same)
            notes.append(f"The peaks of {model} come from different work: {each}.")
    return notes


def workload(run: RunRecord) -> str:
    """What one step works on, in words."""
    tokens = tokens_per_step(run)
    words = [
        "tokens a step not recorded" if tokens is None else f"{tokens:,} tokens a step",
        "sequence not recorded" if run.sequence_tokens is None else f"sequences of {run.sequence_tokens:,}",
        run.matmul_dtype or "dtype not proven",
    ]
    return ", ".join(words)
