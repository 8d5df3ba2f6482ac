"""How close training comes to the limits of its machine: peak, measured products, power, memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tprimat.analyze.compare import LEAST_HELD_BACK
from tprimat.analyze.groups import Group, group_estimate, group_held_back, group_mean, group_worst
from tprimat.analyze.metrics import MetricOptions, of_machine
from tprimat.analyze.probes import PRODUCTS, Setting, fastest, flop_rate, setting_of
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
