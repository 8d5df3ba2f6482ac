"""Tables of the probes of one machine, one per kind, in Markdown; None if nothing of that kind was measured."""

import re
from collections.abc import Iterable, Sequence

from tprimat.analyze import probes as figures
from tprimat.core import units
from tprimat.core.flops import SEED_SHAPES
from tprimat.predict.rates import product_of, under_load
from tprimat.records.schema import Estimate, ProbeRecord
from tprimat.report.tables import filled_table

DESCRIPTIONS = {shape: name for name, shape in SEED_SHAPES.items()}
PLAIN = ("torch.matmul", "scaled_mm tensor-wise")
DTYPES = ("bf16", "fp8", "fp16", "tf32", "fp32")
LIBRARY_PAIRS = (
    ("torch.matmul", "F.linear"),
    ("torch.matmul cuBLASLt", "torch.matmul cuBLAS"),
    ("F.linear cuBLASLt", "F.linear cuBLAS"),
    ("torch.matmul hipBLASLt", "torch.matmul rocBLAS"),
    ("F.linear hipBLASLt", "F.linear rocBLAS"),
)

WITHIN_NOISE = "within noise"
"""Instead of a difference between two rates whose 95 % intervals overlap."""

OUT_OF_MEMORY = re.compile(r"(out of memory)\..*", re.DOTALL)

LESS_IMPORTANT = ("n", "shapes tried", "clock, power", "step", "memory", "algorithm bandwidth", "median time", "description")
"""Columns in the order in which a narrow terminal loses them."""

Probes = Sequence[ProbeRecord]


def of_kind(probes: Iterable[ProbeRecord], *kinds: str) -> list[ProbeRecord]:
    """Select records in the order in which they were measured."""
    return [probe for probe in probes if probe.kind in kinds]


def time_of(probe: ProbeRecord) -> str:
    """Format the median time with half the width of its interval."""
    time = figures.median_seconds(probe)
    return units.ABSENT if time is None else f"{units.seconds(time.value)}{spread(time)}"


def spread(estimate: Estimate) -> str:
    """Format half the interval's width, relative to the value."""
    if estimate.low is None or estimate.high is None:
        return ""
    share = (estimate.high - estimate.low) / 2 / estimate.value
    return " ± over 100 %" if share > 1 else f" ± {units.percent(share)}"


def rate_of(probe: ProbeRecord) -> str:
    """Format FLOP/s, or a dash for a refusal."""
    return units.teraflops(figures.flop_rate(probe))


def shape_of(probe: ProbeRecord) -> str:
    """Format (m, k, n)."""
    return f"({probe.shape['m']}, {probe.shape['k']}, {probe.shape['n']})"


def description(probe: ProbeRecord) -> str:
    """Return where the shape comes from."""
    return DESCRIPTIONS.get((probe.shape["m"], probe.shape["k"], probe.shape["n"]), units.ABSENT)


def reason_of(error: str) -> str:
    """Shorten an out-of-memory error: the sizes that the allocator adds differ from call to call."""
    return OUT_OF_MEMORY.sub(r"\1.", error)


def refusals(probes: Iterable[ProbeRecord]) -> str:
    """List the refusals, one line per reason."""
    reasons: dict[str, list[str]] = {}
    for probe in probes:
        if probe.error:
            length = f" at {probe.shape['sequence']:,}" if "sequence" in probe.shape else ""
            length += f" on {probe.shape['ranks']} ranks" if "ranks" in probe.shape else ""
            reasons.setdefault(reason_of(probe.error), []).append(f"{probe.variant or probe.kind} {probe.dtype}{length}")
    lines = [f"- {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]
    return "\n\nNot measured:\n\n" + "\n".join(lines) if lines else ""


def squares(probes: Probes) -> str | None:
    """Tabulate the three square products in half precision."""
    rows = [
        [f"{probe.shape['m']}x{probe.shape['n']}", probe.dtype, time_of(probe), rate_of(probe), share(probe)]
        for probe in of_kind(probes, "gemm")
        if probe.variant == PLAIN[0] and probe.dtype in {"fp16", "bf16"} and len(set(probe.shape.values())) == 1 and probe.seconds
    ]
    return filled_table(["matrix", "dtype", "median time", "rate", "of dense peak"], rows, left=2) if rows else None


def share(probe: ProbeRecord) -> str:
    """Format the fraction of the dense peak."""
    return units.percent(figures.share_of_peak(probe))


def seed_products(probes: Probes) -> list[ProbeRecord]:
    """Select the measured products of the tables by shape."""
    return [probe for probe in of_kind(probes, "gemm") if probe.dtype in DTYPES and probe.variant in PLAIN and probe.seconds]


def gemm(probes: Probes) -> str | None:
    """Tabulate the matrix products, one table per dtype, fastest first, with mean and peak."""
    parts = []
    for dtype in DTYPES:
        chosen = [probe for probe in seed_products(probes) if probe.dtype == dtype]
        if chosen:
            parts.append(gemm_of_dtype(dtype, chosen))
    failed = refusals(of_kind(probes, "gemm"))
    return "\n\n".join(parts) + failed if parts else failed.strip() or None


def gemm_of_dtype(dtype: str, probes: Probes) -> str:
    """Tabulate the shapes in one dtype."""
    ordered = sorted(probes, key=lambda probe: -(figures.flop_rate(probe) or 0.0))
    rows = [
        [shape_of(probe), description(probe), time_of(probe), str(len(probe.seconds)), rate_of(probe), share(probe), clock(probe)]
        for probe in ordered
    ]
    best = figures.fastest(probes)
    summary = (
        f"**{dtype} average: {units.teraflops(figures.mean_rate(probes))} · peak: {rate_of(best) if best else units.ABSENT}**"
    )
    header = ["(m, k, n)", "description", "median time", "n", "rate", "of dense peak", "clock, power"]
    return f"### {dtype}, {probes[0].variant}\n\n{filled_table(header, rows, left=2)}\n\n{summary}"


def clock(probe: ProbeRecord) -> str:
    """Format clock and power during the measurement."""
    read = ((probe.clock_hertz, "Hz"), (probe.power_watts, "W"))
    return ", ".join(units.si(value, unit) for value, unit in read if value is not None) or units.ABSENT


def rounds(probes: Probes) -> str | None:
    """Tabulate products that were measured in several rounds: warm, and after sustained load."""
    found: dict[tuple[str, str], dict[str, list[ProbeRecord]]] = {}
    for probe in of_kind(probes, "gemm_warm", "gemm_sustained"):
        if probe.seconds:
            found.setdefault((probe.dtype, shape_of(probe)), {}).setdefault(probe.kind, []).append(probe)
    rows = []
    for (dtype, shape), kinds in found.items():
        warm, loaded = (figures.rounds_of(kinds.get(kind, ())) for kind in ("gemm_warm", "gemm_sustained"))
        lower = units.ABSENT if warm is None or loaded is None else units.signed_percent(loaded.median / warm.median - 1)
        last = kinds.get("gemm_sustained", kinds.get("gemm_warm", []))[-1]
        rows.append([dtype, shape, *_rounds(warm), *_rounds(loaded), lower, clock(last)])
    header = ["dtype", "(m, k, n)", "warm", "between rounds", "sustained", "between rounds", "sustained vs warm", "clock, power"]
    return filled_table(header, rows, left=2) if rows else None


def _rounds(found: figures.Rounds | None) -> list[str]:
    if found is None:
        return [units.ABSENT, units.ABSENT]
    return [units.teraflops(found.median), f"{units.percent(found.spread)} over {found.count}"]


def searched(probes: Probes) -> str | None:
    """Tabulate the fastest product that the search found, measured again."""
    winners = [probe for probe in of_kind(probes, "gemm") if (probe.variant or "").endswith(" searched") and probe.seconds]
    tried = of_kind(probes, "gemm_search")
    rows = [
        [
            probe.dtype,
            shape_of(probe),
            time_of(probe),
            rate_of(probe),
            share(probe),
            units.count(sum(other.dtype == probe.dtype for other in tried)),
        ]
        for probe in winners
    ]
    return filled_table(["dtype", "(m, k, n)", "median time", "rate", "of dense peak", "shapes tried"], rows) if rows else None


def libraries(probes: Probes) -> str | None:
    """Compare pairs of calls and libraries at the same shapes, in bf16."""
    parts = []
    for first, second in LIBRARY_PAIRS:
        found = {
            (probe.variant, shape_of(probe)): probe
            for probe in of_kind(probes, "gemm")
            if probe.dtype == "bf16" and probe.variant in {first, second} and probe.seconds
        }
        rows = []
        for shape in dict.fromkeys(shape for _, shape in found):
            one, other = found.get((first, shape)), found.get((second, shape))
            if one and other:
                rows.append([shape, rate_of(one), rate_of(other), _difference(one, other)])
        if rows:
            parts.append(filled_table(["(m, k, n), bf16", first, second, "difference"], rows))
    return "\n\n".join(parts) or None


def _difference(one: ProbeRecord, other: ProbeRecord) -> str:
    """Format by how much one rate exceeds the other at the same shape, if their 95 % intervals are disjoint."""
    ratio = figures.distinct_ratio(one, other)
    return WITHIN_NOISE if ratio is None else units.signed_percent(ratio - 1)


def models(probes: Probes) -> str | None:
    """Tabulate the configured models' own products at each tensor-parallel degree."""
    chosen = of_kind(probes, "model_gemm")
    degrees = sorted({probe.shape["tensor_parallel"] for probe in chosen})
    rows = []
    for name, dtype, m in dict.fromkeys((probe.variant, probe.dtype, probe.shape["m"]) for probe in chosen):
        same = [probe for probe in chosen if (probe.variant, probe.dtype, probe.shape["m"]) == (name, dtype, m)]
        found = {probe.shape["tensor_parallel"]: probe for probe in same}
        cells = [_rate_and_share(found.get(degree)) for degree in degrees]
        rows.append([name or units.ABSENT, dtype, str(m), *cells])
    return filled_table(["product", "dtype", "tokens", *(f"TP {degree}" for degree in degrees)], rows, left=2) if rows else None


def _rate_and_share(probe: ProbeRecord | None) -> str:
    """Format '712 TFLOP/s (72.0 %)', without brackets where the peak is not known."""
    if probe is None:
        return units.ABSENT
    return rate_of(probe) + ("" if figures.share_of_peak(probe) is None else f" ({share(probe)})")


def attention(probes: Probes) -> str | None:
    """Tabulate the rates of forward and backward by length and backend."""
    parts = []
    for kind in ("attention_forward", "attention_backward"):
        chosen = [probe for probe in of_kind(probes, kind) if probe.seconds]
        variants = list(dict.fromkeys(probe.variant or "" for probe in chosen))
        lengths = sorted({probe.shape["sequence"] for probe in chosen})
        found = {(probe.shape["sequence"], probe.variant): rate_of(probe) for probe in chosen}
        rows = [[str(length), *(found.get((length, variant), units.ABSENT) for variant in variants)] for length in lengths]
        if rows:
            title = kind.removeprefix("attention_").capitalize()
            parts.append(f"### {title}\n\n{filled_table(['sequence', *variants], rows)}")
    failed = refusals(of_kind(probes, "attention_forward", "attention_backward"))
    return "\n\n".join(parts) + failed if parts else failed.strip() or None


def system(probes: Probes) -> str:
    """Describe the machine and its software, as recorded."""
    newest = max(probes, key=lambda probe: probe.started_at)
    machine = newest.machine
    most = max((probe.machine.gpus or 1 for probe in probes), default=1)
    rows = [
        ["accelerator", machine.accelerator or units.ABSENT],
        ["devices used (maximum)", units.count(most)],
        ["memory per device", units.gibibytes(machine.memory_bytes)],
        ["power limit", units.si(machine.power_limit_watts, "W")],
        ["driver", machine.driver or units.ABSENT],
        *([name, version] for name, version in sorted(newest.software.items())),
        ["measured", f"{min(probe.started_at for probe in probes)} to {newest.started_at}"],
    ]
    others = [one for one in figures.settings_of(probes) if one != figures.setting_of(machine, newest.software)]
    notes = [f"Some figures were measured under driver {one.driver} with torch {one.torch}." for one in others]
    return "\n\n".join([filled_table(["property", "value"], rows, left=2), *notes])


def memory(probes: Probes) -> str | None:
    """List the bandwidth of the device's memory."""
    rows = [
        [
            probe.kind,
            units.message_size(probe.shape["array_bytes"]),
            time_of(probe),
            units.si(rate, "B/s"),
            units.percent(figures.share_of_bandwidth(probe)),
        ]
        for probe in of_kind(probes, "copy", "triad", "fill")
        if (rate := figures.bandwidth(probe))
    ]
    return filled_table(["operation", "array", "median time", "bandwidth", "of data sheet"], rows) if rows else None


def collectives(probes: Probes) -> str | None:
    """List latency, algorithm bandwidth and bus bandwidth."""
    chosen = of_kind(probes, *figures.BUS_FACTORS, "collectives")
    rows = [
        [
            probe.kind,
            probe.variant or units.ABSENT,
            units.count(probe.shape["ranks"]),
            units.message_size(probe.shape["message_bytes"]),
            time_of(probe),
            units.si(rate, "B/s"),
            units.si(figures.bus_bandwidth(probe), "B/s"),
        ]
        for probe in chosen
        if (rate := figures.bandwidth(probe))
    ]
    header = ["operation", "library", "ranks", "message", "median time", "algorithm bandwidth", "bus bandwidth"]
    return (filled_table(header, rows, left=2) if rows else "") + refusals(chosen) or None


def mlp(probes: Probes) -> str | None:
    """Describe the training of the three-layer network."""
    parts = []
    for probe in of_kind(probes, "mlp_step"):
        rate, flops = figures.samples_per_second(probe), figures.flop_rate(probe)
        if rate and flops:
            rows = [
                ["weights", units.count(probe.shape["weights"])],
                ["batch", units.count(probe.shape["batch"])],
                ["steps", units.count(len(probe.seconds))],
                ["total time", units.seconds(sum(probe.seconds))],
                ["**samples/s**", f"**{units.count(rate)}**"],
                ["step time", time_of(probe)],
                ["rate", units.teraflops(flops)],
            ]
            parts.append(filled_table(["metric", "value"], rows))
    return "\n\n".join(parts) + refusals(of_kind(probes, "mlp_step")) or None


def transformer_models(probes: Probes) -> str | None:
    """List the architectures that were trained."""
    rows = [
        [
            probe.variant or units.ABSENT,
            *(str(probe.shape[key]) for key in ("layers", "heads", "hidden", "ffn")),
            units.count(probe.shape["parameters"]),
        ]
        for probe in of_kind(probes, "transformer_step")
    ]
    return filled_table(["model", "layers", "heads", "width", "feed-forward", "parameters"], rows) if rows else None


def transformer_results(probes: Probes) -> str | None:
    """List the throughput of one device."""
    chosen = of_kind(probes, "transformer_step")
    rows = [training_row(probe, probes) for probe in chosen if probe.seconds]
    header = ["model", "batch", "sequence", "tokens/s", "rate, 6N", "rate, causal", "of dense peak", "of fastest product"]
    return (filled_table([*header, "memory", "step"], rows) if rows else "") + refusals(chosen) or None


def training_row(probe: ProbeRecord, probes: Probes) -> list[str]:
    """Describe one model on one device; all probes are needed for the fastest product among them."""
    return [
        probe.variant or units.ABSENT,
        str(probe.shape["batch"]),
        str(probe.shape["sequence"]),
        units.count(figures.tokens_per_second(probe)),
        units.teraflops(figures.six_n_rate(probe)),
        rate_of(probe),
        share(probe),
        units.percent(figures.share_of_fastest_product(probe, probes)),
        units.gibibytes(probe.peak_allocated_bytes),
        time_of(probe),
    ]


def ddp(probes: Probes) -> str | None:
    """List throughput by number of devices; efficiency is throughput over ranks times the throughput of one."""
    chosen = of_kind(probes, "ddp_step", "ddp")
    parts = []
    for name in dict.fromkeys(probe.variant for probe in chosen if probe.seconds):
        steps = sorted((p for p in chosen if p.variant == name and p.seconds), key=lambda probe: probe.shape["ranks"])
        parts.append(f"### {name}\n\n{scaling_table(steps)}")
    return "\n\n".join(parts) + refusals(chosen) or None


def scaling_table(steps: Probes) -> str:
    """List one model by number of ranks."""
    rows = []
    for probe in steps:
        ranks, total = probe.shape["ranks"], figures.six_n_rate(probe)
        rows.append(
            [
                str(ranks),
                units.count(probe.shape["batch"] * ranks),
                units.count(figures.tokens_per_second(probe)),
                units.teraflops(total),
                units.teraflops(None if total is None else total / ranks),
                units.gibibytes(probe.peak_allocated_bytes),
                units.percent(figures.scaling_efficiency(probe, steps)),
                time_of(probe),
            ]
        )
    header = ["devices", "global batch", "tokens/s", "total rate, 6N", "rate per device", "memory per device"]
    return filled_table([*header, "scaling efficiency", "step"], rows, left=0)


PIECE_KINDS = ("fprop", "dgrad", "wgrad", "grouped_fprop", "grouped_dgrad", "grouped_wgrad", "region", "launch", "overlapped")


def pieces(probes: Probes) -> str | None:
    """Tabulate what predictions are composed of, in the order of measurement."""
    found = of_kind(probes, *PIECE_KINDS)
    loaded = {product_of(probe) for probe in found if under_load(probe)}
    chosen = [probe for probe in found if under_load(probe) or product_of(probe) not in loaded]  # no burst of the same product
    rows = [
        [
            f"{probe.kind.replace('_', ' ')}{', fp8' if probe.dtype == 'fp8' else ''}",
            probe.variant or units.ABSENT,
            ", ".join(f"{name} {value:,}" for name, value in probe.shape.items()),
            time_of(probe),
            _speed(probe),
        ]
        for probe in chosen
        if probe.seconds
    ]
    return filled_table(["piece", "of", "size", "median time", "rate"], rows, left=3) + refusals(chosen) if rows else None


def _speed(probe: ProbeRecord) -> str:
    """Format FLOP/s, bytes/s or launches/s, whichever the probe has."""
    if "launches" in probe.shape:
        each = figures.per_second(probe.shape["launches"], probe)
        return units.ABSENT if each is None else f"{units.count(each)} launches/s"
    moved = figures.bandwidth(probe)
    return units.si(moved, "B/s") if moved else rate_of(probe)
