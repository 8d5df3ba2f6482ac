"""The matrix multiplication rate that the machine of a run was measured to reach: what its training rate is held against."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tprimat.analyze.groups import Group, group_estimate
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.probes import PRODUCTS, Setting, bandwidth, bus_bandwidth, fastest, flop_rate, setting_of
from tprimat.facts.models import parameters
from tprimat.records.metrics import RunMetrics
from tprimat.records.schema import ProbeRecord, RunRecord

ON_A_PROCESSOR = "no share of a measured matrix product is shown: the probes of a processor are small, and its processes share it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The best product measured on a run's machine, or why there is none."""

    flop_per_second: float | None
    """Of one accelerator."""
    probe: ProbeRecord | None = None
    notes: tuple[str, ...] = ()
    """Why probes were left out, or what could not be compared."""


def gemm_ceiling(run: RunRecord, probes: Sequence[ProbeRecord]) -> Ceiling:
    """The fastest product in the run's dtype, among probes of the same accelerator under the same driver, torch and power limit.

    A driver or power limit that the run does not tell is passed over with a note; a torch version that it does not tell is not,
    because then nothing shows that the run and the probes share a machine. A processor has no ceiling: its probes are small, and
    the processes of a run share it.
    """
    if run.machine.platform == "cpu":
        return Ceiling(flop_per_second=None, notes=(ON_A_PROCESSOR,))
    wanted = [probe for probe in probes if probe.kind in PRODUCTS and probe.dtype == run.matmul_dtype and probe.seconds]
    if not wanted:
        return Ceiling(flop_per_second=None, notes=(f"no matrix product was probed in {run.matmul_dtype or 'its dtype'}",))
    target = setting_of(run.machine, run.software)
    differences = [_why_not_alike(target, setting_of(probe.machine, probe.software)) for probe in wanted]
    usable = [probe for probe, why in zip(wanted, differences, strict=True) if why is None]
    left_out = tuple(dict.fromkeys(why for why in differences if why))
    best = fastest(usable)
    rate = flop_rate(best) if best else None
    if best is None or rate is None:
        return Ceiling(flop_per_second=None, notes=left_out)
    return Ceiling(flop_per_second=rate.value, probe=best, notes=(*left_out, *_unknown_settings(target, run.machine.platform)))


def _why_not_alike(run: Setting, probe: Setting) -> str | None:
    """Why a probe says nothing about a run; None where it does."""
    if run.accelerator is None or probe.accelerator is None or run.torch is None:
        return "probes are left out because the run does not tell its accelerator and its torch version"
    for what, ours, theirs in (
        ("on", run.accelerator, probe.accelerator),
        ("under driver", run.driver, probe.driver),
        ("with torch", run.torch, probe.torch),
        ("at a power limit in watts of", run.power_limit_watts, probe.power_limit_watts),
    ):
        if ours is not None and ours != theirs:
            return f"probes taken {what} {theirs} are left out: the run was made {what} {ours}"
    return None


def _unknown_settings(run: Setting, platform: str) -> tuple[str, ...]:
    """What the run of a GPU does not tell and could not be compared."""
    if platform == "cpu":
        return ()
    absent = [name for name, value in (("driver", run.driver), ("power limit", run.power_limit_watts)) if value is None]
    return (f"the run does not tell its {' and '.join(absent)}, which the probes may not share",) if absent else ()


# How far a configuration is from what its machine can give.

NEAR_A_LIMIT = 0.9
"""Share of a limit from which on it is said to bind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit of the machine, and the share of it that is used. Absent where either is not known."""

    kind: Literal["peak", "measured matmul", "memory"]
    share: float
    """0..1 of the limit; above 1 only where a limit was measured too low."""
    size: float | None = None
    """FLOP/s of one GPU, or bytes of one GPU."""

    @property
    def binds(self) -> bool:
        """Whether there is next to no room left."""
        return self.share >= NEAR_A_LIMIT


def limits(group: Group) -> tuple[Limit, ...]:
    """What is known of a group's distance from its limits: compute first, memory last."""
    metrics = [item.metrics for item in group.runs if item.metrics is not None]
    found = []
    mfu = group_estimate(group, lambda one: one.mfu)
    if mfu is not None:
        found.append(Limit(kind="peak", share=mfu.value, size=metrics[0].peak_dense_flops))
    shares = [one.share_of_measured_gemm for one in metrics if one.share_of_measured_gemm is not None]
    if shares:
        found.append(Limit(kind="measured matmul", share=sum(shares) / len(shares)))
    peaks = [one.peak_memory_bytes for one in metrics if one.peak_memory_bytes is not None]
    size = group.run.machine.memory_bytes
    if peaks and size:
        found.append(Limit(kind="memory", share=max(peaks) / size, size=float(size)))
    return tuple(found)


def under_ceiling(options: "MetricOptions", run: RunRecord, probes: Sequence[ProbeRecord]) -> "MetricOptions":
    """The options with the best product measured on the run's machine, and why probes were left out; as they are without any."""
    from tprimat.analyze.roofline import gemm_ceiling

    if not probes:
        return options
    ceiling = gemm_ceiling(run, probes)
    return replace(options, gemm_ceiling_flops=ceiling.flop_per_second, gemm_ceiling_notes=ceiling.notes)


# What each part of a training step would take alone, at the rates that probes of the same machine reached.
#
# Parts that overlap do not add up; what a step takes beyond the largest of them is what is left to gain.

OPTIMIZER_BYTES = {"fp32": 30, "bf16": 14}
"""A weight in Adam's update. With fp32 states: gradient read (4), master weight and both moments read and written (24), bf16
weight written (2); with bf16 states: gradient read (2), weight and both moments read and written (12)."""
GRADIENT_BYTES, WEIGHT_BYTES = 4, 2
"""fp32 gradients are summed over the replicas, bf16 weights gathered from them."""
TENSOR_EXCHANGES = 10
"""A layer's, with sequence parallelism: two gathers and two sums forward, the same backward, and two inputs gathered once more
for the gradients of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Seconds of one step on one GPU. None: no probe tells, or 0 where there is no such part."""

    model_flops: float | None
    """All of the model's arithmetic, at the rate of the fastest matrix product."""
    optimizer: float | None
    """The update of this rank's share, at the rate of a copy."""
    replicas: float | None
    """Gradients and weights exchanged between the replicas."""
    tensor_ranks: float | None
    """Activations exchanged between the ranks that share each matrix."""
    bubble: float | None
    """Pipeline stages waiting at both ends of a step, of the arithmetic."""


def step_breakdown(run: RunRecord, metrics: RunMetrics, probes: Sequence[ProbeRecord]) -> StepBreakdown | None:
    """The parts of a run's step; None where the record does not tell its shape, split and batch."""
    tensor, pipeline, data = run.tensor_parallel, run.pipeline_parallel, run.data_parallel
    batch, sequence, shape, gpus = run.global_batch_sequences, run.sequence_tokens, run.shape, run.machine.gpus
    if not (tensor and pipeline and data and batch and sequence and shape and gpus and metrics.flop_per_token):
        return None
    ceiling = gemm_ceiling(run, probes).flop_per_second
    flops = None if ceiling is None else metrics.flop_per_token * batch * sequence / gpus / ceiling
    copy = max((rate.value for probe in probes if probe.kind == "copy" and (rate := bandwidth(probe))), default=None)
    states = OPTIMIZER_BYTES.get(str(run.engine_options.get("optimizer_states", "fp32")))
    own = parameters(shape).total / (tensor * pipeline)
    others = (data - 1) / data
    exchanged = 2 * shape.hidden * batch * sequence / data * (tensor - 1) / tensor * shape.layers / pipeline
    rounds = run.accumulation_steps
    return StepBreakdown(
        model_flops=flops,
        optimizer=None if copy is None or states is None else states * own / data / copy,
        replicas=_sum_or_none(
            _seconds(GRADIENT_BYTES * own * others, fastest_bus(probes, "reduce_scatter", data)),
            _seconds(WEIGHT_BYTES * own * others, fastest_bus(probes, "all_gather", data)),
        ),
        tensor_ranks=_seconds(TENSOR_EXCHANGES * exchanged, fastest_bus(probes, "all_gather", tensor)),
        bubble=None if flops is None or not rounds else flops * (pipeline - 1) / (rounds * (run.virtual_pipeline or 1)),
    )


def fastest_bus(probes: Sequence[ProbeRecord], kind: str, ranks: int) -> float | None:
    """The highest bus bandwidth of a collective, bytes/s, whatever the message; over as many ranks, if any probe was."""
    found = [(probe.shape["ranks"], rate) for probe in probes if probe.kind == kind and (rate := bus_bandwidth(probe))]
    alike = [rate for size, rate in found if size == ranks]
    return max(alike or [rate for _, rate in found], default=None)


def _seconds(size: float, rate: float | None) -> float | None:
    """Seconds; none at all for nothing, and unknown without a rate."""
    if not size:
        return 0.0
    return None if rate is None else size / rate


def _sum_or_none(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second
