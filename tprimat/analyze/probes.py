"""Rates and bandwidths from the samples of probes, and their shares of the data sheet's values."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tprimat.analyze.metrics import MetricOptions, scaled
from tprimat.core.accelerators import find_accelerator, peak_flops
from tprimat.core.statistics import median, median_interval
from tprimat.records.schema import Estimate, Machine, ProbeRecord, RunRecord

BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "send_recv": lambda ranks: 1.0,
}
"""Bus bandwidth over algorithm bandwidth: the traffic of each link, comparable with the hardware's speed on any number of ranks
(nccl-tests, doc/PERFORMANCE.md)."""


def median_seconds(probe: ProbeRecord) -> Estimate | None:
    """Return the median time of one repetition; None where nothing was measured."""
    return scaled(median_interval(np.array(probe.seconds)), 1.0, len(probe.seconds)) if probe.seconds else None


def per_second(amount: float | None, probe: ProbeRecord) -> float | None:
    """Return an amount per repetition over the median time."""
    return amount / median(np.array(probe.seconds)) if probe.seconds and amount is not None else None


def flop_rate(probe: ProbeRecord) -> float | None:
    """Return the FLOP/s of all ranks."""
    return per_second(probe.flop, probe)


def bandwidth(probe: ProbeRecord) -> float | None:
    """Return bytes/s: read and written for memory, algorithm bandwidth (message over time) for a collective."""
    return per_second(probe.bytes, probe)


def bus_bandwidth(probe: ProbeRecord) -> float | None:
    """Return the bus bandwidth of a collective operation in bytes/s."""
    rate, factor = bandwidth(probe), BUS_FACTORS.get(probe.kind)
    return None if rate is None or factor is None else rate * factor(probe.shape["ranks"])


def share_of_peak(probe: ProbeRecord) -> float | None:
    """Return the share of all ranks' dense peak in the probe's dtype; None where the data sheet is not known."""
    rate, peak = flop_rate(probe), peak_flops(probe.machine.accelerator, probe.dtype)
    return None if rate is None or peak is None else rate / peak / (probe.machine.gpus or 1)


def share_of_bandwidth(probe: ProbeRecord) -> float | None:
    """Return the share of the data sheet's memory bandwidth."""
    rate, accelerator = bandwidth(probe), find_accelerator(probe.machine.accelerator)
    return None if rate is None or accelerator is None else rate / accelerator.bandwidth_bytes_per_second


def samples_per_second(probe: ProbeRecord) -> float | None:
    """Return the sequences/s, or inputs/s of the three-layer network, of all ranks."""
    batch = probe.shape.get("batch")
    return per_second(None if batch is None else batch * probe.shape.get("ranks", 1), probe)


def tokens_per_second(probe: ProbeRecord) -> float | None:
    """Return the tokens/s of a transformer's step on all ranks."""
    samples, tokens = samples_per_second(probe), probe.shape.get("sequence")
    return None if samples is None or tokens is None else samples * tokens


def six_n_rate(probe: ProbeRecord) -> float | None:
    """Return the FLOP/s of a transformer's step on all ranks by 6n: embeddings count, attention does not."""
    tokens, parameters = tokens_per_second(probe), probe.shape.get("parameters")
    return None if tokens is None or parameters is None else 6 * parameters * tokens


class ProbeSetting(NamedTuple):
    """Conditions that rates depend on besides the operation. Probes of one setting belong on one page."""

    accelerator: str | None
    driver: str | None
    power_limit_watts: float | None
    torch: str | None


def setting_of(machine: Machine, software: dict[str, str]) -> ProbeSetting:
    """Return the setting of a probe or a run."""
    return ProbeSetting(machine.accelerator, machine.driver, machine.power_limit_watts, software.get("torch"))


def newest_of_each(probes: Iterable[ProbeRecord]) -> list[ProbeRecord]:
    """Return the newest record of each operation and size in the newest probe's setting, in order of first appearance.

    A later refusal never replaces a record with samples.
    """
    records = sorted(probes, key=lambda probe: probe.started_at)
    if not records:
        return []
    setting = setting_of(records[-1].machine, records[-1].software)
    newest: dict[object, ProbeRecord] = {}
    for probe in records:
        key = (probe.kind, probe.variant, tuple(probe.shape.items()), probe.dtype, probe.machine.gpus)
        if setting_of(probe.machine, probe.software) == setting and (probe.seconds or key not in newest):
            newest[key] = probe
    return list(newest.values())


def fastest(probes: Sequence[ProbeRecord]) -> ProbeRecord | None:
    """Return the probe with the highest FLOP rate."""
    return max((probe for probe in probes if flop_rate(probe)), key=lambda probe: flop_rate(probe) or 0.0, default=None)


PRODUCTS = ("gemm", "model_gemm")
"""Kinds measured at full effort; brief candidates of a search, which older records have, do not count."""


def share_of_fastest_product(step: ProbeRecord, probes: Sequence[ProbeRecord]) -> float | None:
    """Return a training step's rate on one device over the fastest product in its dtype and setting."""
    alike = [probe for probe in probes if setting_of(probe.machine, probe.software) == setting_of(step.machine, step.software)]
    rate, best = flop_rate(step), fastest([probe for probe in alike if probe.kind in PRODUCTS and probe.dtype == step.dtype])
    ceiling = flop_rate(best) if best else None
    on_cpu = step.machine.platform == "cpu"
    return None if rate is None or ceiling is None or on_cpu else rate / (step.machine.gpus or 1) / ceiling


def scaling_efficiency(step: ProbeRecord, steps: Sequence[ProbeRecord]) -> float | None:
    """Return the throughput over that of one rank times the ranks; None where one rank was not measured."""
    alike = [one for one in steps if (one.kind, one.variant) == (step.kind, step.variant) and one.seconds]
    one = next((tokens_per_second(probe) for probe in alike if probe.shape["ranks"] == 1), None)
    tokens = tokens_per_second(step)
    return tokens / one / step.shape["ranks"] if tokens and one else None


def settings_of(probes: Iterable[ProbeRecord]) -> list[ProbeSetting]:
    """Return the different settings, in order of first appearance."""
    return list(dict.fromkeys(setting_of(probe.machine, probe.software) for probe in probes))


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


def under_ceiling(options: MetricOptions, run: RunRecord, probes: Sequence[ProbeRecord]) -> MetricOptions:
    """Return the options with the fastest product measured on the run's machine."""
    return replace(options, gemm_ceiling_flops=gemm_ceiling(run, probes)) if probes else options
