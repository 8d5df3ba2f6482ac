"""What an accelerator's page says in short: one sentence for each kind of operation, with the figures of the records."""

from collections.abc import Callable, Sequence

from tprimat import units
from tprimat.analyze import probes as figures
from tprimat.records.schema import ProbeRecord
from tprimat.report.probes import PLAIN, Probes, clock, of_kind, rate_of, shape_of, share


def in_short(probes: Probes) -> str:
    """A list; empty where nothing was measured."""
    lines = [line for make in FINDINGS for line in make(probes)]
    return "\n".join(f"- {line}" for line in lines)


def products(probes: Probes) -> list[str]:
    """The fastest product in the two dtypes that training multiplies in."""
    found = []
    for dtype in ("bf16", "fp8"):
        best = figures.fastest_product(probes, dtype)
        mean = figures.mean_rate([p for p in of_kind(probes, "gemm") if p.dtype == dtype and p.variant in PLAIN])
        if best is None:
            continue
        text = f"Matrix products in {dtype} reach up to {rate_of(best)}, {share(best)} of the dense peak, at {shape_of(best)}"
        known = best.clock_hertz is not None or best.power_watts is not None
        text += f" ({clock(best)})" if known else ""
        found.append(text + (f"; {units.teraflops(mean)} on average over the table's shapes." if mean else "."))
    return found


def attention(probes: Probes) -> list[str]:
    """The fastest backend each way."""
    found = []
    for kind in ("attention_forward", "attention_backward"):
        best = figures.fastest(of_kind(probes, kind))
        if best:
            way, backend = kind.removeprefix("attention_"), best.variant or units.ABSENT
            found.append(f"Attention {way} reaches up to {rate_of(best)}, by {backend} at {best.shape['sequence']:,} tokens.")
    return found


def memory(probes: Probes) -> list[str]:
    """The best of the three patterns."""
    best = _highest([p for p in of_kind(probes, "copy", "triad", "fill") if p.seconds], figures.share_of_bandwidth)
    rate = figures.bandwidth(best) if best else None
    if best is None or rate is None:
        return []
    part = units.percent(figures.share_of_bandwidth(best))
    return [f"Memory moves up to {units.si(rate.value, 'B/s')} ({best.kind}), {part} of the data sheet."]


def collectives(probes: Probes) -> list[str]:
    """The bus bandwidth of the largest all-reduce, for each number of ranks."""
    measured = [probe for probe in of_kind(probes, "all_reduce") if probe.seconds]
    found = []
    for ranks in sorted({probe.shape["ranks"] for probe in measured}):
        largest = max((p for p in measured if p.shape["ranks"] == ranks), key=lambda p: p.shape["message_bytes"])
        size, rate = units.message_size(largest.shape["message_bytes"]), units.si(figures.bus_bandwidth(largest), "B/s")
        found.append(f"An all-reduce of {size} over {ranks} devices moves {rate} on the bus ({largest.variant}).")
    return found


def training(probes: Probes) -> list[str]:
    """The transformer with the highest utilization, and what it is of the fastest product."""
    best = figures.fastest([probe for probe in of_kind(probes, "transformer_step") if probe.seconds])
    if best is None:
        return []
    text = f"A training step of the {best.variant} transformer reaches {rate_of(best)}, {share(best)} of the dense peak"
    measured = figures.share_of_fastest_product(best, probes)
    return [text + ("." if measured is None else f" and {units.percent(measured)} of the fastest product above.")]


def scaling(probes: Probes) -> list[str]:
    """Efficiency of data parallelism on the most devices."""
    found = []
    steps = [probe for probe in of_kind(probes, "ddp_step") if probe.seconds]
    for name in dict.fromkeys(probe.variant for probe in steps):
        same = [probe for probe in steps if probe.variant == name]
        most = max(same, key=lambda probe: probe.shape["ranks"])
        efficiency = figures.scaling_efficiency(most, same)
        if efficiency is not None and most.shape["ranks"] > 1:
            kept, ranks = units.percent(efficiency), most.shape["ranks"]
            found.append(f"Data-parallel training of {name} keeps {kept} of its speed on {ranks} devices.")
    return found


def _highest(probes: Sequence[ProbeRecord], value: Callable[[ProbeRecord], float | None]) -> ProbeRecord | None:
    known = [(number, place) for place, probe in enumerate(probes) if (number := value(probe)) is not None]
    return probes[max(known)[1]] if known else None


FINDINGS: tuple[Callable[[Probes], list[str]], ...] = (products, attention, memory, collectives, training, scaling)
