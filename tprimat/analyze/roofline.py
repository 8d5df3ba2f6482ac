"""How close training comes to the limits of its machine: peak, measured products, power, memory; and the parts of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tprimat.analyze.compare import LEAST_HELD_BACK
from tprimat.analyze.groups import Group, group_estimate, group_held_back, group_mean, group_worst
from tprimat.analyze.metrics import MetricOptions, of_machine
from tprimat.analyze.probes import PRODUCTS, Setting, bandwidth, bus_bandwidth, fastest, flop_rate, setting_of
from tprimat.core.flops import parameters
from tprimat.records.schema import ProbeRecord, RunMetrics, RunRecord

ON_CPU = "no share of a measured matrix product is shown: the probes of a processor are small, and its processes share it"


def gemm_ceiling(run: RunRecord, probes: Sequence[ProbeRecord]) -> tuple[float | None, tuple[str, ...]]:
    """Find the fastest product in the run's dtype among probes of the same accelerator, driver, torch and power limit.

    Returns its FLOP/s on one accelerator, None where there is none; and why probes were excluded, or what could not be compared.

    A run that does not record its driver or power limit still has a ceiling, with a note. A run that does not record its torch
    version has none, because nothing then shows that it shares a machine with the probes. A CPU has no ceiling: its probes are
    small, and the processes of a run share it.
    """
    if run.machine.platform == "cpu":
        return None, (ON_CPU,)
    wanted = [probe for probe in probes if probe.kind in PRODUCTS and probe.dtype == run.ran.matmul_dtype and probe.seconds]
    if not wanted:
        return None, (f"no matrix product was probed in {run.ran.matmul_dtype or 'its dtype'}",)
    target = setting_of(run.machine, run.software)
    differences = [_why_not_alike(target, setting_of(probe.machine, probe.software)) for probe in wanted]
    usable = [probe for probe, why in zip(wanted, differences, strict=True) if why is None]
    left_out = tuple(dict.fromkeys(why for why in differences if why))
    best = fastest(usable)
    if best is None:
        return None, left_out
    return flop_rate(best), (*left_out, *_unknown_settings(target))


def _why_not_alike(run: Setting, probe: Setting) -> str | None:
    """Return why a probe says nothing about a run, or None."""
    if run.accelerator is None or probe.accelerator is None or run.torch is None:
        return "probes are left out because the run does not record its accelerator and its torch version"
    for what, ours, theirs in (
        ("on", run.accelerator, probe.accelerator),
        ("under driver", run.driver, probe.driver),
        ("with torch", run.torch, probe.torch),
        ("at a power limit in watts of", run.power_limit_watts, probe.power_limit_watts),
    ):
        if ours is not None and ours != theirs:
            return f"probes taken {what} {theirs} are left out: the run was made {what} {ours}"
    return None


def _unknown_settings(run: Setting) -> tuple[str, ...]:
    """Return a note on what a run does not record and so could not be compared."""
    absent = [name for name, value in (("driver", run.driver), ("power limit", run.power_limit_watts)) if value is None]
    return (f"the run does not record its {' and '.join(absent)}, which the probes may not share",) if absent else ()


NEAR_A_LIMIT = 0.9
"""Share of a limit from which it binds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit of the machine, and the share of it that a configuration uses."""

    kind: Literal["peak", "measured matmul", "power", "memory", "reserved memory"]
    """The allocator reserves memory that it may not use; it counts where a run records no more than that."""
    share: float
    """0..1 of the limit; above 1 only where a limit was measured too low."""
    size: float | None = None
    """FLOP/s, watts or bytes of one GPU."""

    @property
    def binds(self) -> bool:
        """Return whether next to no room is left."""
        return self.share >= NEAR_A_LIMIT and self.kind != "reserved memory"


def watts_per_gpu(run: RunRecord, metrics: RunMetrics | None) -> float | None:
    """Return the mean power of one GPU over the steady steps: energy of a token x tokens per second / GPUs."""
    gpus = run.machine.gpus
    if metrics is None or metrics.joules_per_token is None or metrics.tokens_per_second is None or not gpus:
        return None
    return metrics.joules_per_token * metrics.tokens_per_second / gpus


def limits(group: Group) -> tuple[Limit, ...]:
    """Return the known limits of a group: compute first, memory last; power only where it held back more than a few clocks."""
    metrics = [item.metrics for item in group.runs if item.metrics is not None]
    found = []
    mfu = group_estimate(group, lambda one: one.mfu)
    if mfu is not None:
        found.append(Limit(kind="peak", share=mfu.value, size=metrics[0].peak_dense_flops))
    share = group_mean(group, lambda one: one.share_of_measured_gemm)
    if share is not None:
        found.append(Limit(kind="measured matmul", share=share))
    power, most = group_mean(group, lambda one: watts_per_gpu(group.run, one)), group.run.machine.power_limit_watts
    held = (share for reason, share in (group_held_back(group) or {}).items() if not of_machine(reason))
    if power and most and max(held, default=0.0) >= LEAST_HELD_BACK:
        found.append(Limit(kind="power", share=power / most, size=most))
    peak, size = group_worst(group, lambda one: one.peak_memory_bytes), group.run.machine.memory_bytes
    reserved = group_worst(group, lambda one: one.peak_reserved_bytes)
    if size and (used := peak or reserved):
        found.append(Limit(kind="memory" if peak else "reserved memory", share=used / size, size=float(size)))
    return tuple(found)


def under_ceiling(options: MetricOptions, run: RunRecord, probes: Sequence[ProbeRecord]) -> MetricOptions:
    """Return the options with the fastest product measured on the run's machine, and with notes on excluded probes."""
    if not probes:
        return options
    ceiling, notes = gemm_ceiling(run, probes)
    return replace(options, gemm_ceiling_flops=ceiling, gemm_ceiling_notes=notes)


# What each part of a training step would take alone, at the rates that probes of the same machine reached.
#
OPTIMIZER_BYTES = {"fp32": 30, "bf16": 14}
"""Bytes that Adam's update moves per weight. With fp32 states: gradient read (4), master weight and both moments read and
written (24), bf16 weight written (2); with bf16 states: gradient read (2), weight and both moments read and written (12)."""
GRADIENT_BYTES, WEIGHT_BYTES = 4, 2
"""Bytes per weight: fp32 gradients are summed over the replicas, bf16 weights gathered from them."""
TENSOR_EXCHANGES = 10
"""Exchanges of a layer with sequence parallelism: two gathers and two sums forward, the same backward, and two inputs gathered
once more for the gradients of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Seconds that each part of a step would take by itself on one GPU, at the rates that probes reached.

    None where no probe measured the rate, 0 where the step has no such part. Parts that overlap do not add up; what a step takes
    beyond the largest of them is left to gain.
    """

    model_flops: float | None
    """The model's arithmetic at the rate of the fastest matrix product."""
    optimizer: float | None
    """The update of the rank's own weights at the rate of a copy."""
    replicas: float | None
    """Exchange of gradients and weights between replicas."""
    tensor_ranks: float | None
    """Exchange of activations between tensor-parallel ranks."""
    bubble: float | None
    """Arithmetic time that pipeline stages wait at both ends of a step."""


def step_breakdown(run: RunRecord, metrics: RunMetrics, probes: Sequence[ProbeRecord]) -> StepBreakdown | None:
    """Compute the parts of a run's step; None where shape, layout or batch is not recorded."""
    tensor, pipeline, data = run.ran.tensor_parallel, run.ran.pipeline_parallel, run.ran.data_parallel
    batch, sequence, shape, gpus = run.ran.global_batch_sequences, run.ran.sequence_tokens, run.ran.shape, run.machine.gpus
    if not (tensor and pipeline and data and batch and sequence and shape and gpus and metrics.flop_per_token):
        return None
    ceiling, _ = gemm_ceiling(run, probes)
    flops = None if ceiling is None else metrics.flop_per_token * batch * sequence / gpus / ceiling
    copy = max((rate for probe in probes if probe.kind == "copy" and (rate := bandwidth(probe))), default=None)
    states = OPTIMIZER_BYTES.get(run.ran.optimizer_states or "fp32")
    own = parameters(shape).total / (tensor * pipeline)
    others = (data - 1) / data
    exchanged = 2 * shape.hidden * batch * sequence / data * (tensor - 1) / tensor * shape.layers / pipeline
    rounds = run.ran.accumulation_steps
    return StepBreakdown(
        model_flops=flops,
        optimizer=None if copy is None or states is None else states * own / data / copy,
        replicas=_sum_or_none(
            _seconds(GRADIENT_BYTES * own * others, fastest_bus(probes, "reduce_scatter", data)),
            _seconds(WEIGHT_BYTES * own * others, fastest_bus(probes, "all_gather", data)),
        ),
        tensor_ranks=_seconds(TENSOR_EXCHANGES * exchanged, fastest_bus(probes, "all_gather", tensor)),
        bubble=None if flops is None or not rounds else flops * (pipeline - 1) / (rounds * (run.ran.virtual_pipeline or 1)),
    )


def fastest_bus(probes: Sequence[ProbeRecord], kind: str, ranks: int) -> float | None:
    """Return the highest bus bandwidth of a collective in bytes/s over all messages, on as many ranks if a probe has them."""
    found = [(probe.shape["ranks"], rate) for probe in probes if probe.kind == kind and (rate := bus_bandwidth(probe))]
    alike = [rate for size, rate in found if size == ranks]
    return max(alike or [rate for _, rate in found], default=None)


def _seconds(size: float, rate: float | None) -> float | None:
    """Return the seconds for a number of bytes: 0 for none, None without a rate."""
    if not size:
        return 0.0
    return None if rate is None else size / rate


def _sum_or_none(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second
