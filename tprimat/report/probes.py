"""One Markdown page about an accelerator, from its probes: how fast single operations and small training loops run."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tprimat.analyze import probes as figures
from tprimat.core import units
from tprimat.core.flops import SEED_SHAPES
from tprimat.predict.rates import product_of, under_load
from tprimat.records.schema import ProbeRecord
from tprimat.report.tables import Screen, columns, filled, plural, table

Probes = Sequence[ProbeRecord]

DESCRIPTIONS = {shape: name for name, shape in SEED_SHAPES.items()}
PLAIN = ("torch.matmul", "scaled_mm tensor-wise")
DTYPES = ("bf16", "fp8", "fp16", "tf32", "fp32")
PIECE_KINDS = ("fprop", "dgrad", "wgrad", "grouped_fprop", "grouped_dgrad", "grouped_wgrad", "region", "launch", "overlapped")
OUT_OF_MEMORY = re.compile(r"(out of memory)\..*", re.DOTALL)
"""The sizes that the allocator adds differ from call to call."""
LESS_IMPORTANT = ("n", "clock, power", "step", "memory", "algorithm bandwidth", "median time", "description")
"""Columns in the order in which a narrow terminal loses them."""


def of_kind(probes: Iterable[ProbeRecord], *kinds: str) -> list[ProbeRecord]:
    """Select records in the order in which they were measured."""
    return [probe for probe in probes if probe.kind in kinds]


# Cells.


def time_of(probe: ProbeRecord) -> str:
    """Format the median time with half the width of its interval."""
    time = figures.median_seconds(probe)
    if time is None or time.low is None or time.high is None:
        return units.seconds(time.value) if time else units.ABSENT
    half = (time.high - time.low) / 2 / time.value
    return f"{units.seconds(time.value)} ± {'over 100 %' if half > 1 else units.percent(half)}"


def rate_of(probe: ProbeRecord) -> str:
    """Format FLOP/s, or a dash for a refusal."""
    return units.teraflops(figures.flop_rate(probe))


def _share(probe: ProbeRecord) -> str:
    return units.percent(figures.share_of_peak(probe))


def _clock(probe: ProbeRecord) -> str:
    read = ((probe.clock_hertz, "Hz"), (probe.power_watts, "W"))
    return ", ".join(units.si(value, unit) for value, unit in read if value is not None) or units.ABSENT


def _sides(probe: ProbeRecord) -> tuple[int, int, int]:
    return probe.shape["m"], probe.shape["k"], probe.shape["n"]


def _bandwidth(probe: ProbeRecord) -> str:
    return units.si(figures.bandwidth(probe), "B/s")


def _speed(probe: ProbeRecord) -> str:
    if "launches" in probe.shape:
        return f"{units.count(figures.per_second(probe.shape['launches'], probe))} launches/s"
    return _bandwidth(probe) if probe.bytes else rate_of(probe)


def _efficiency(probe: ProbeRecord, probes: Probes) -> float | None:
    same = [other for other in of_kind(probes, probe.kind) if other.variant == probe.variant and other.seconds]
    return figures.scaling_efficiency(probe, same)


def _size(name: str) -> "Cell":
    return lambda probe, _: units.count(probe.shape[name])


Cell = Callable[[ProbeRecord, Probes], str]
TEXT: dict[str, Cell] = {
    "(m, k, n)": lambda probe, _: str(_sides(probe)),
    "description": lambda probe, _: DESCRIPTIONS.get(_sides(probe), units.ABSENT),
    "piece": lambda probe, _: probe.kind.replace("_", " ") + (", fp8" if probe.dtype == "fp8" else ""),
    "size": lambda probe, _: ", ".join(f"{name} {value:,}" for name, value in probe.shape.items()),
    "dtype": lambda probe, _: probe.dtype,
    "pass": lambda probe, _: probe.kind.removeprefix("attention_"),
    "operation": lambda probe, _: probe.kind,
    **dict.fromkeys(("of", "library", "model", "product"), lambda probe, _: probe.variant or units.ABSENT),
}
CELLS: dict[str, Cell] = {
    **TEXT,
    **{name: _size(name) for name in ("batch", "sequence", "ranks", "parameters", "weights")},
    "devices": _size("ranks"),
    "tokens": _size("m"),
    "array": lambda probe, _: units.message_size(probe.shape["array_bytes"]),
    "message": lambda probe, _: units.message_size(probe.shape["message_bytes"]),
    "global batch": lambda probe, _: units.count(probe.shape["batch"] * probe.shape["ranks"]),
    "n": lambda probe, _: str(len(probe.seconds)),
    **dict.fromkeys(("median time", "step"), lambda probe, _: time_of(probe)),
    **dict.fromkeys(("rate", "rate, causal"), lambda probe, _: _speed(probe)),
    **dict.fromkeys(("rate, 6N", "total rate, 6N"), lambda probe, _: units.teraflops(figures.six_n_rate(probe))),
    "rate per device": lambda probe, _: units.teraflops((figures.six_n_rate(probe) or 0) / probe.shape["ranks"]),
    "of dense peak": lambda probe, _: _share(probe),
    "of fastest product": lambda probe, probes: units.percent(figures.share_of_fastest_product(probe, probes)),
    "scaling efficiency": lambda probe, probes: units.percent(_efficiency(probe, probes)),
    **dict.fromkeys(("bandwidth", "algorithm bandwidth"), lambda probe, _: _bandwidth(probe)),
    "bus bandwidth": lambda probe, _: units.si(figures.bus_bandwidth(probe), "B/s"),
    "of data sheet": lambda probe, _: units.percent(figures.share_of_bandwidth(probe)),
    "samples/s": lambda probe, _: units.count(figures.samples_per_second(probe)),
    "tokens/s": lambda probe, _: units.count(figures.tokens_per_second(probe)),
    **dict.fromkeys(("memory", "memory per device"), lambda probe, _: units.gibibytes(probe.peak_allocated_bytes)),
    "clock, power": lambda probe, _: _clock(probe),
}
"""Heading -> cell of a probe among all probes."""


# Tables.


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text, the first `left` columns flush left; none where nothing was measured."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int


def listed(chosen: Probes, probes: Probes, *headings: str) -> Table:
    """Return a table with a row for each of the chosen probes that was measured."""
    rows = [[CELLS[heading](probe, probes) for heading in headings] for probe in chosen if probe.seconds]
    return Table(headings, rows, sum(heading in TEXT for heading in headings))


def crossed(
    probes: Probes, rows: Sequence[str], column: Callable[[ProbeRecord], str], cell: Callable[[ProbeRecord], str] = rate_of
) -> Table:
    """Return a table with a row for each choice of some headings, and a column for each choice of a trait."""
    measured = [probe for probe in probes if probe.seconds]
    cells = {(tuple(CELLS[heading](probe, probes) for heading in rows), column(probe)): cell(probe) for probe in measured}
    names = dict.fromkeys(name for _, name in cells)
    lines = [[*row, *(cells.get((row, name), units.ABSENT) for name in names)] for row in dict.fromkeys(row for row, _ in cells)]
    return Table([*rows, *names], lines, sum(heading in TEXT for heading in rows) or 1)


def of_kinds(*kinds: str, headings: Sequence[str]) -> "Make":
    """Return the function that lists probes of some kinds."""
    return lambda probes: listed(of_kind(probes, *kinds), probes, *headings)


def gemm(probes: Probes) -> Table:
    """List the matrix products, fastest first in each dtype."""
    chosen = [probe for probe in of_kind(probes, "gemm") if probe.dtype in DTYPES and probe.variant in PLAIN]
    chosen.sort(key=lambda probe: (DTYPES.index(probe.dtype), -(figures.flop_rate(probe) or 0.0)))
    headings = ("dtype", "(m, k, n)", "description", "median time", "n", "rate", "of dense peak", "clock, power")
    return listed(chosen, probes, *headings)


def libraries(probes: Probes) -> Table:
    """List the rate of each call and library at the shapes that several of them computed in bf16."""
    products = [probe for probe in of_kind(probes, "gemm") if probe.dtype == "bf16" and not (probe.variant or "").endswith("ed")]
    shapes = [_sides(probe) for probe in products if probe.seconds]
    several = [probe for probe in products if shapes.count(_sides(probe)) > 1]
    return crossed(several, ["(m, k, n)"], lambda probe: probe.variant or units.ABSENT)


def models(probes: Probes) -> Table:
    """List the configured models' own products at each tensor-parallel degree."""
    chosen = sorted(of_kind(probes, "model_gemm"), key=lambda probe: probe.shape["tensor_parallel"])

    def with_share(probe: ProbeRecord) -> str:
        return rate_of(probe) + ("" if figures.share_of_peak(probe) is None else f" ({_share(probe)})")

    rows = ("product", "dtype", "tokens")
    return crossed(chosen, rows, lambda probe: f"TP {probe.shape['tensor_parallel']}", with_share)


def attention(probes: Probes) -> Table:
    """List the rates of forward and backward by length and backend."""
    chosen = of_kind(probes, "attention_forward", "attention_backward")
    chosen.sort(key=lambda probe: (probe.kind != "attention_forward", probe.shape["sequence"]))
    return crossed(chosen, ["pass", "sequence"], lambda probe: probe.variant or "")


def ddp(probes: Probes) -> Table:
    """List throughput by number of devices; efficiency is throughput over ranks times the throughput of one."""
    chosen = sorted(of_kind(probes, "ddp_step"), key=lambda probe: (probe.shape["parameters"], probe.shape["ranks"]))
    headings = ("model", "devices", "global batch", "tokens/s", "total rate, 6N", "rate per device", "memory per device")
    return listed(chosen, probes, *headings, "scaling efficiency", "step")


def pieces(probes: Probes) -> Table:
    """List what predictions are composed of, in the order of measurement; no burst of what was measured under load."""
    every = of_kind(probes, *PIECE_KINDS)
    loaded = {product_of(probe) for probe in every if under_load(probe)}
    chosen = [probe for probe in every if under_load(probe) or product_of(probe) not in loaded]
    return listed(chosen, probes, "piece", "of", "size", "median time", "rate")


def system(probes: Probes) -> Table:
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
    return Table(["property", "value"], rows, 2)


# The page.

Make = Callable[[Probes], Table]
TIMED = ("operation", "library", "ranks", "message", "median time", "algorithm bandwidth", "bus bandwidth")
MOVED = ("operation", "array", "median time", "bandwidth", "of data sheet")
SMALL_NETWORK = ("weights", "batch", "n", "samples/s", "step", "rate")
TRAINED = (
    *("model", "parameters", "batch", "sequence", "tokens/s", "rate, 6N", "rate, causal", "of dense peak", "of fastest product"),
    *("memory", "step"),
)
SHAPES = (
    "(m, k) times (k, n): shapes of Llama 70B under eight-way tensor parallelism and three squares, as in SemiAnalysis's "
    "comparison of 2024-12-22; small sizes are about a 64th of each side."
)
ATTENTION = (
    "Causal, bf16, 32 query heads, 8 key/value heads, head dimension 128; on a GPU 32,768 tokens at every sequence length. "
    "FLOP count half the square; the backward pass counts 2.5 times the forward pass."
)
NETWORK = "On a GPU 4096 to 8192 to 8192 to 4096, with ReLU, in bf16 with AdamW. Each weight and sample counts six FLOP."
TRANSFORMER = (
    "GPT-2's structure in plain PyTorch on one device, without compilation or recomputation, all states in bf16. 6N counts six "
    "FLOP for each parameter and token; causal counts the weights that multiply a token and half the attention square."
)
PARTS = (
    "A step's prediction is the sum of these: products forward (fprop), of the input's gradient (dgrad) and of the weight's with "
    "its fp32 sum (wgrad); grouped ones belong to experts. Regions and launches count both passes."
)
COPIES = ("copy", "triad", "fill")
ATTENTIONS = ("attention_forward", "attention_backward")
SECTIONS: tuple[tuple[str, str, Make, tuple[str, ...]], ...] = (
    ("Matrix multiplication at a language model's shapes", SHAPES, gemm, ("gemm",)),
    ("Calls and libraries", "The same product through several calls and libraries, in bf16.", libraries, ()),
    (
        "Products of the trained models",
        "Of one tensor-parallel rank, forward; in brackets: of the dense peak.",
        models,
        ("model_gemm",),
    ),
    ("Attention", ATTENTION, attention, ATTENTIONS),
    ("Memory", "Each array that is read or written counts once, as in STREAM.", of_kinds(*COPIES, headings=MOVED), COPIES),
    (
        "Collective operations",
        "Time of the slowest rank. Message sizes and bandwidths follow the definitions of nccl-tests.",
        of_kinds(*figures.BUS_FACTORS, headings=TIMED),
        (*figures.BUS_FACTORS, "collectives"),
    ),
    ("Three-layer network", NETWORK, of_kinds("mlp_step", headings=SMALL_NETWORK), ("mlp_step",)),
    ("Transformer training: results", TRANSFORMER, of_kinds("transformer_step", headings=TRAINED), ("transformer_step",)),
    (
        "Data-parallel scaling",
        "The same under DistributedDataParallel, with a constant batch per device.",
        ddp,
        ("ddp_step", "ddp"),
    ),
    ("Parts of a training step", PARTS, pieces, PIECE_KINDS),
)
"""Title, text, the function that makes the table, and the kinds whose refusals stand below it."""
ON_REQUEST = "Parts of a training step"
"""A page without it is complete."""
SMALL_SIZES = "Small sizes, as on a CPU, show that everything runs, not how fast it is."


def page(probes: Probes) -> str:
    """Write the page about the accelerator, driver, power limit and torch version of the newest probe, from one probe or more."""
    return page_of(figures.newest_of_each(probes))


def page_of(chosen: Probes, preface: str = "", appendix: str = "") -> str:
    """Write the page from selected probes, one for each operation at each size, between a preface and an appendix."""
    machine = chosen[-1].machine
    on_cpu = machine.platform == "cpu"
    timer = "the host's clock" if on_cpu else "device events, and peaks are the dense peaks of the data sheet"
    parts = [f"# What {machine.accelerator or machine.platform} reaches", preface, "## System", _markdown(system(chosen))]
    others = [one for one in figures.settings_of(chosen) if one != figures.setting_of(chosen[-1].machine, chosen[-1].software)]
    parts += [f"Some figures were measured under driver {one.driver} with torch {one.torch}." for one in others]
    parts.append(
        f"All figures come from the samples in probes.jsonl. Times are medians of n repetitions, by {timer}; "
        "± is half the width of the 95 % interval over consecutive repetitions."
    )
    parts += caution(chosen)
    parts += [] if on_cpu else ["## Summary", "\n".join(f"- {line}" for line in summary(chosen))]
    missing = []
    for title, text, make, kinds in SECTIONS:
        made, refused = make(chosen), refusals(of_kind(chosen, *kinds))
        if made.rows or refused:
            parts += [f"## {title}", text, _markdown(made), "\n".join(refused)]
        elif title != ON_REQUEST:
            missing.append(title)
    parts += [f"Not measured yet: {', '.join(missing)}." if missing else "", appendix]
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown(made: Table) -> str:
    return table(*filled(made.header, made.rows, made.left)) if made.rows else ""


def on_a_screen(probes: Probes, screen: Screen) -> str:
    """Write the tables for a terminal, from the newest of each operation."""
    newest = figures.newest_of_each(probes)
    parts = [screen.prose(line.replace("`", "")) for line in caution(newest)]
    for title, _, make, kinds in SECTIONS:
        made, refused = make(newest), refusals(of_kind(newest, *kinds))
        if made.rows or refused:
            header, rows, left = filled(made.header, made.rows, made.left)
            shown = [columns(header, rows, left=left, screen=screen, drop=LESS_IMPORTANT)] if rows else []
            parts.append("\n".join([screen.paint(title, "heading"), *shown, *(screen.prose(line, 2) for line in refused)]))
    return "\n\n".join(parts)


def refusals(probes: Iterable[ProbeRecord]) -> list[str]:
    """Say what was refused, one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for probe in probes:
        if probe.error:
            length = f" at {probe.shape['sequence']:,}" if "sequence" in probe.shape else ""
            length += f" on {plural(probe.shape['ranks'], 'rank')}" if "ranks" in probe.shape else ""
            reason = OUT_OF_MEMORY.sub(r"\1.", probe.error)
            reasons.setdefault(reason, []).append(f"{probe.variant or probe.kind} {probe.dtype}{length}")
    return [f"- not measured: {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]


def caution(probes: Probes) -> list[str]:
    """Say that small sizes measure no speed, where there are some."""
    return [SMALL_SIZES] if any(map(figures.is_small, probes)) else []


def summary(probes: Probes) -> list[str]:
    """Return a sentence for each kind of operation; none where nothing was measured."""
    measured = [probe for probe in probes if probe.seconds]
    lines = []
    for name in DTYPES:
        best = figures.fastest_product(measured, name)
        if best is not None:
            alike = [probe for probe in of_kind(measured, "gemm") if probe.dtype == name and probe.variant in PLAIN]
            average = f"; {units.teraflops(figures.mean_rate(alike))} on average over the table's shapes" if alike else ""
            what = f"Matrix products in {name} reach up to {rate_of(best)}, {_share(best)} of the dense peak, at {_sides(best)}"
            lines.append(what + (f" ({_clock(best)})" if _clock(best) != units.ABSENT else "") + average + ".")
    passes = {name: figures.fastest(of_kind(measured, f"attention_{name}")) for name in ("forward", "backward")}
    lines += [
        f"Attention {name} reaches up to {rate_of(best)}, with {best.variant} at {best.shape['sequence']:,} tokens."
        for name, best in passes.items()
        if best
    ]
    patterns = of_kind(measured, "copy", "triad", "fill")
    best = max(patterns, key=lambda probe: figures.bandwidth(probe) or 0.0, default=None)
    if best is not None:
        part = units.percent(figures.share_of_bandwidth(best))
        lines.append(f"Memory moves up to {_bandwidth(best)} ({best.kind}), {part} of the data sheet.")
    by_size = sorted(of_kind(measured, "all_reduce"), key=lambda probe: probe.shape["message_bytes"])
    for ranks, one in sorted({probe.shape["ranks"]: probe for probe in by_size}.items()):
        message, rate = units.message_size(one.shape["message_bytes"]), units.si(figures.bus_bandwidth(one), "B/s")
        lines.append(f"An all-reduce of {message} over {ranks} devices reaches a bus bandwidth of {rate} ({one.variant}).")
    if best := figures.fastest(of_kind(measured, "transformer_step")):
        of_product = units.percent(figures.share_of_fastest_product(best, measured))
        what = f"A training step of the {best.variant} transformer reaches {rate_of(best)}, {_share(best)} of the dense peak"
        lines.append(f"{what} and {of_product} of the fastest product above.")
    steps = sorted(of_kind(measured, "ddp_step"), key=lambda probe: probe.shape["ranks"])
    for most in {probe.variant: probe for probe in steps}.values():
        ranks, kept = most.shape["ranks"], _efficiency(most, measured)
        if kept is not None and ranks > 1:
            lines.append(
                f"Data-parallel training of {most.variant} scales to {ranks} devices at {units.percent(kept)} efficiency."
            )
    return lines
