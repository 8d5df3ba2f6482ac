"""How close training comes to the limits of its machine: peak, measured products, power, memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tprimat.analyze.compare import LEAST_HELD_BACK
from tprimat.analyze.groups import Group, group_estimate, group_held_back, group_mean, group_worst
from tprimat.analyze.metrics import MetricOptions, of_machine
from tprimat.analyze.probes import PRODUCTS, fastest, flop_rate, setting_of
from tprimat.records.schema import ProbeRecord, RunMetrics, RunRecord


def gemm_ceiling(run: RunRecord, probes: Sequence[ProbeRecord]) -> float | None:
    """Return the FLOP/s of the fastest product in the run's dtype among probes of its accelerator, driver, torch and power limit.

    A run that does not record its driver or power limit still has a ceiling. One without its torch version has none, because
    nothing then shows that it shares a machine with the probes. Nor has a CPU: its probes are small, and ranks share it.
    """
    target = setting_of(run.machine, run.software)
    if run.machine.platform == "cpu" or None in {target.accelerator, target.torch}:
        return None
    best = fastest(
        [
            probe
            for probe in probes
            if probe.kind in PRODUCTS
            and (probe.dtype, probe.machine.accelerator) == (run.ran.matmul_dtype, target.accelerator)
            and probe.software.get("torch") == target.torch
            and target.driver in {None, probe.machine.driver}
            and target.power_limit_watts in {None, probe.machine.power_limit_watts}
        ]
    )
    return None if best is None else flop_rate(best)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit of the machine, and the share of it that a configuration uses."""

    kind: Literal["peak", "measured matmul", "power", "memory", "reserved memory"]
    """The allocator reserves memory that it may not use; it counts where a run records no more than that."""
    share: float
    """0..1 of the limit; above 1 only where a limit was measured too low."""
    size: float | None = None
    """FLOP/s, watts or bytes of one GPU."""


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
    held = (share for reason, share in (group_held_back(group) or {}).items() if not of_machine(reason, 1.0))
    if power and most and max(held, default=0.0) >= LEAST_HELD_BACK:
        found.append(Limit(kind="power", share=power / most, size=most))
    peak, size = group_worst(group, lambda one: one.peak_memory_bytes), group.run.machine.memory_bytes
    reserved = group_worst(group, lambda one: one.peak_reserved_bytes)
    if size and (used := peak or reserved):
        found.append(Limit(kind="memory" if peak else "reserved memory", share=used / size, size=float(size)))
    return tuple(found)


def under_ceiling(options: MetricOptions, run: RunRecord, probes: Sequence[ProbeRecord]) -> MetricOptions:
    """Return the options with the fastest product measured on the run's machine."""
    return replace(options, gemm_ceiling_flops=gemm_ceiling(run, probes)) if probes else options
