"""One Markdown page about an accelerator, from its probes: how fast single operations and small training loops run."""

import re
from collections.abc import Callable, Iterable, Sequence

from tprimat.analyze import probes as figures
from tprimat.core import units
from tprimat.core.effort import MIN_SAMPLES_TO_SETTLE, Effort, reduced
from tprimat.core.flops import SEED_SHAPES
from tprimat.predict.rates import product_of, under_load
from tprimat.records.schema import ProbeRecord
from tprimat.report.screen import Screen
from tprimat.report.tables import filled_table, markdown_as_text

Probes = Sequence[ProbeRecord]

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
PIECE_KINDS = ("fprop", "dgrad", "wgrad", "grouped_fprop", "grouped_dgrad", "grouped_wgrad", "region", "launch", "overlapped")
WITHIN_NOISE = "within noise"
"""Instead of a difference between two rates whose 95 % intervals overlap."""
OUT_OF_MEMORY = re.compile(r"(out of memory)\..*", re.DOTALL)
"""The sizes that the allocator adds differ from call to call."""
LESS_IMPORTANT = ("n", "shapes tried", "clock, power", "step", "memory", "algorithm bandwidth", "median time", "description")
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


def share(probe: ProbeRecord) -> str:
    """Format the fraction of the dense peak."""
    return units.percent(figures.share_of_peak(probe))


def clock(probe: ProbeRecord) -> str:
    """Format clock and power during the measurement."""
    read = ((probe.clock_hertz, "Hz"), (probe.power_watts, "W"))
    return ", ".join(units.si(value, unit) for value, unit in read if value is not None) or units.ABSENT


def sides(probe: ProbeRecord) -> tuple[int, int, int]:
    """Return m, k and n."""
    return probe.shape["m"], probe.shape["k"], probe.shape["n"]


def bandwidth(probe: ProbeRecord) -> str:
    """Format bytes/s."""
    return units.si(figures.bandwidth(probe), "B/s")


def speed(probe: ProbeRecord) -> str:
    """Format FLOP/s, bytes/s or launches/s, whichever the probe has."""
    if "launches" in probe.shape:
        return f"{units.count(figures.per_second(probe.shape['launches'], probe))} launches/s"
    return bandwidth(probe) if probe.bytes else rate_of(probe)


def six_n(probe: ProbeRecord, devices: int = 1) -> str:
    """Format FLOP/s by 6n, over so many devices."""
    rate = figures.six_n_rate(probe)
    return units.teraflops(None if rate is None else rate / devices)


def efficiency(probe: ProbeRecord, probes: Probes) -> float | None:
    """Return the efficiency of scaling one model."""
    same = [other for other in of_kind(probes, probe.kind) if other.variant == probe.variant and other.seconds]
    return figures.scaling_efficiency(probe, same)


Cell = Callable[[ProbeRecord, Probes], str]
TEXT: dict[str, Cell] = {
    "(m, k, n)": lambda probe, _: str(sides(probe)),
    "description": lambda probe, _: DESCRIPTIONS.get(sides(probe), units.ABSENT),
    "piece": lambda probe, _: probe.kind.replace("_", " ") + (", fp8" if probe.dtype == "fp8" else ""),
    "size": lambda probe, _: ", ".join(f"{name} {value:,}" for name, value in probe.shape.items()),
    "dtype": lambda probe, _: probe.dtype,
    "operation": lambda probe, _: probe.kind,
    **dict.fromkeys(("of", "library", "model", "product"), lambda probe, _: probe.variant or units.ABSENT),
}
SIZES = {
    **{name: name for name in ("batch", "sequence", "layers", "heads")},
    "width": "hidden",
    "feed-forward": "ffn",
    "ranks": "ranks",
    "devices": "ranks",
    "tokens": "m",
}
"""Heading -> size of the operation."""


def size(name: str) -> Cell:
    """Return the cell of a size."""
    return lambda probe, _: str(probe.shape[name])


CELLS: dict[str, Cell] = {
    **TEXT,
    **{heading: size(name) for heading, name in SIZES.items()},
    "array": lambda probe, _: units.message_size(probe.shape["array_bytes"]),
    "message": lambda probe, _: units.message_size(probe.shape["message_bytes"]),
    "parameters": lambda probe, _: units.count(probe.shape["parameters"]),
    "weights": lambda probe, _: units.count(probe.shape["weights"]),
    "global batch": lambda probe, _: units.count(probe.shape["batch"] * probe.shape["ranks"]),
    "n": lambda probe, _: str(len(probe.seconds)),
    **dict.fromkeys(("median time", "step"), lambda probe, _: time_of(probe)),
    "total time": lambda probe, _: units.seconds(sum(probe.seconds)),
    **dict.fromkeys(("rate", "rate, causal"), lambda probe, _: speed(probe)),
    **dict.fromkeys(("rate, 6N", "total rate, 6N"), lambda probe, _: six_n(probe)),
    "rate per device": lambda probe, _: six_n(probe, probe.shape["ranks"]),
    "of dense peak": lambda probe, _: share(probe),
    "of fastest product": lambda probe, probes: units.percent(figures.share_of_fastest_product(probe, probes)),
    "scaling efficiency": lambda probe, probes: units.percent(efficiency(probe, probes)),
    **dict.fromkeys(("bandwidth", "algorithm bandwidth"), lambda probe, _: bandwidth(probe)),
    "bus bandwidth": lambda probe, _: units.si(figures.bus_bandwidth(probe), "B/s"),
    "of data sheet": lambda probe, _: units.percent(figures.share_of_bandwidth(probe)),
    "samples/s": lambda probe, _: units.count(figures.samples_per_second(probe)),
    "tokens/s": lambda probe, _: units.count(figures.tokens_per_second(probe)),
    **dict.fromkeys(("memory", "memory per device"), lambda probe, _: units.gibibytes(probe.peak_allocated_bytes)),
    "clock, power": lambda probe, _: clock(probe),
    "shapes tried": lambda probe, probes: units.count(
        sum(other.dtype == probe.dtype for other in of_kind(probes, "gemm_search"))
    ),
}
"""Heading -> cell of a probe among all probes."""


# Tables.


def listed(chosen: Probes, probes: Probes, *headings: str) -> str | None:
    """Return a table with a row for each of the chosen probes that was measured; None without any."""
    rows = [[CELLS[heading](probe, probes) for heading in headings] for probe in chosen if probe.seconds]
    return filled_table(headings, rows, left=sum(heading in TEXT for heading in headings)) if rows else None


def crossed(probes: Probes, rows: Sequence[str], column: Callable[[ProbeRecord], str], cell: Callable[[ProbeRecord], str]) -> str:
    """Return a table with a row for each choice of some headings, and a column for each choice of a trait."""
    cells = {(tuple(CELLS[heading](probe, probes) for heading in rows), column(probe)): cell(probe) for probe in probes}
    names = dict.fromkeys(name for _, name in cells)
    lines = [[*row, *(cells.get((row, name), units.ABSENT) for name in names)] for row in dict.fromkeys(row for row, _ in cells)]
    return filled_table([*rows, *names], lines, left=sum(heading in TEXT for heading in rows) or 1)


def with_refusals(tables: Iterable[str | None], probes: Iterable[ProbeRecord]) -> str | None:
    """Return tables, and what was refused, one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for probe in probes:
        if probe.error:
            length = f" at {probe.shape['sequence']:,}" if "sequence" in probe.shape else ""
            length += f" on {probe.shape['ranks']} ranks" if "ranks" in probe.shape else ""
            reason = OUT_OF_MEMORY.sub(r"\1.", probe.error)
            reasons.setdefault(reason, []).append(f"{probe.variant or probe.kind} {probe.dtype}{length}")
    lines = [f"- {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]
    return "\n\n".join([*filter(None, tables), *(["Not measured:", "\n".join(lines)] if lines else [])]) or None


def table_of(kinds: Iterable[str], *headings: str) -> Callable[[Probes], str | None]:
    """Return the function that lists probes of some kinds, and what was refused."""

    def make(probes: Probes) -> str | None:
        chosen = of_kind(probes, *kinds)
        return with_refusals([listed(chosen, probes, *headings)], chosen)

    return make


def seed_products(probes: Probes) -> list[ProbeRecord]:
    """Select the measured products of the tables by shape."""
    return [probe for probe in of_kind(probes, "gemm") if probe.dtype in DTYPES and probe.variant in PLAIN and probe.seconds]


def gemm(probes: Probes) -> str | None:
    """Tabulate the matrix products, one table per dtype, fastest first, with mean and peak."""
    headings = ("(m, k, n)", "description", "median time", "n", "rate", "of dense peak", "clock, power")
    parts = []
    for name in DTYPES:
        chosen = [probe for probe in seed_products(probes) if probe.dtype == name]
        if best := figures.fastest(chosen):
            table = listed(sorted(chosen, key=lambda probe: -(figures.flop_rate(probe) or 0.0)), probes, *headings)
            mean = units.teraflops(figures.mean_rate(chosen))
            parts.append(f"### {name}, {best.variant}\n\n{table}\n\n**{name} average: {mean} · peak: {rate_of(best)}**")
    return with_refusals(parts, of_kind(probes, "gemm"))


def searched(probes: Probes) -> str | None:
    """Tabulate the fastest product that the search found, measured again."""
    winners = [probe for probe in of_kind(probes, "gemm") if (probe.variant or "").endswith(" searched")]
    return listed(winners, probes, "dtype", "(m, k, n)", "median time", "rate", "of dense peak", "shapes tried")


def rounds(probes: Probes) -> str | None:
    """Tabulate products that were measured in several rounds: warm, and after sustained load."""
    kinds = ("gemm_warm", "gemm_sustained")
    groups: dict[tuple[str, str], list[ProbeRecord]] = {}
    for probe in of_kind(probes, *kinds):
        if probe.seconds:
            groups.setdefault((probe.dtype, str(sides(probe))), []).append(probe)
    rows = []
    for (name, shape), group in groups.items():
        warm, loaded = (figures.rounds_of(of_kind(group, kind)) for kind in kinds)
        lower = units.ABSENT if warm is None or loaded is None else units.signed_percent(loaded.median / warm.median - 1)
        last = (of_kind(group, "gemm_sustained") or group)[-1]
        rows.append([name, shape, *_rounds(warm), *_rounds(loaded), lower, clock(last)])
    header = ["dtype", "(m, k, n)", "warm", "between rounds", "sustained", "between rounds", "sustained vs warm", "clock, power"]
    return filled_table(header, rows, left=2) if rows else None


def _rounds(several: figures.Rounds | None) -> list[str]:
    if several is None:
        return [units.ABSENT, units.ABSENT]
    return [units.teraflops(several.median), f"{units.percent(several.spread)} over {several.count}"]


def libraries(probes: Probes) -> str | None:
    """Compare pairs of calls and libraries at the same shapes, in bf16."""
    measured = [probe for probe in of_kind(probes, "gemm") if probe.dtype == "bf16" and probe.seconds]
    parts = []
    for first, second in LIBRARY_PAIRS:
        one, other = ({str(sides(probe)): probe for probe in measured if probe.variant == name} for name in (first, second))
        rows = []
        for shape in (shape for shape in one if shape in other):
            ratio = figures.distinct_ratio(one[shape], other[shape])
            difference = WITHIN_NOISE if ratio is None else units.signed_percent(ratio - 1)
            rows.append([shape, rate_of(one[shape]), rate_of(other[shape]), difference])
        if rows:
            parts.append(filled_table(["(m, k, n), bf16", first, second, "difference"], rows))
    return "\n\n".join(parts) or None


def models(probes: Probes) -> str | None:
    """Tabulate the configured models' own products at each tensor-parallel degree."""
    chosen = sorted(of_kind(probes, "model_gemm"), key=lambda probe: probe.shape["tensor_parallel"])

    def degree(probe: ProbeRecord) -> str:
        return f"TP {probe.shape['tensor_parallel']}"

    def with_share(probe: ProbeRecord) -> str:
        return rate_of(probe) + ("" if figures.share_of_peak(probe) is None else f" ({share(probe)})")

    return crossed(chosen, ("product", "dtype", "tokens"), degree, with_share) if chosen else None


def attention(probes: Probes) -> str | None:
    """Tabulate the rates of forward and backward by length and backend."""
    parts = []
    for kind in ("attention_forward", "attention_backward"):
        chosen = sorted((one for one in of_kind(probes, kind) if one.seconds), key=lambda probe: probe.shape["sequence"])
        table = crossed(chosen, ["sequence"], lambda probe: probe.variant or "", rate_of)
        parts.append(f"### {kind.removeprefix('attention_').capitalize()}\n\n{table}" if chosen else None)
    return with_refusals(parts, of_kind(probes, "attention_forward", "attention_backward"))


def transformer_models(probes: Probes) -> str | None:
    """List the architectures that were trained."""
    headings = ("model", "layers", "heads", "width", "feed-forward", "parameters")
    return listed(of_kind(probes, "transformer_step"), probes, *headings)


def ddp(probes: Probes) -> str | None:
    """List throughput by number of devices; efficiency is throughput over ranks times the throughput of one."""
    chosen = sorted(of_kind(probes, "ddp_step", "ddp"), key=lambda probe: probe.shape["ranks"])
    headings = ("devices", "global batch", "tokens/s", "total rate, 6N", "rate per device", "memory per device")
    parts = []
    for name in dict.fromkeys(probe.variant for probe in chosen if probe.seconds):
        table = listed([one for one in chosen if one.variant == name], probes, *headings, "scaling efficiency", "step")
        parts.append(f"### {name}\n\n{table}")
    return with_refusals(parts, chosen)


def pieces(probes: Probes) -> str | None:
    """Tabulate what predictions are composed of, in the order of measurement; no burst of what was measured under load."""
    every = of_kind(probes, *PIECE_KINDS)
    loaded = {product_of(probe) for probe in every if under_load(probe)}
    chosen = [probe for probe in every if under_load(probe) or product_of(probe) not in loaded]
    table = listed(chosen, probes, "piece", "of", "size", "median time", "rate")
    return with_refusals([table], chosen) if table else None


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


# The page.


def seed_shapes_text(probes: Probes) -> str:
    """Say where the shapes come from, and whether they are scaled down."""
    shapes = {sides(probe) for probe in seed_products(probes)}
    text = "(m, k) times (k, n): shapes of Llama 70B under eight-way tensor parallelism and three squares, as in SemiAnalysis's "
    text += "comparison of 2024-12-22"
    scaled = shapes - set(SEED_SHAPES.values())
    if scaled:
        text += f", {'some with ' if scaled < shapes else ''}each side scaled down to about a 64th"
    return f"{text}. Averages are over the shapes of one table."


MEMORY = ("operation", "array", "median time", "bandwidth", "of data sheet")
COLLECTIVES = ("operation", "library", "ranks", "message", "median time", "algorithm bandwidth", "bus bandwidth")
TRAINED = ("model", "batch", "sequence", "tokens/s", "rate, 6N", "rate, causal", "of dense peak", "of fastest product")
SECTIONS: tuple[tuple[str, str | Callable[[Probes], str], Callable[[Probes], str | None]], ...] = (
    (
        "A scan for the fastest product",
        "Many shapes are timed briefly, one after the other; the fastest is then measured again. Under a power limit, the clock, "
        "and so the ranking, depends on the preceding load. Training rates are therefore compared with the fastest product on "
        "this page, whichever table holds it.",
        searched,
    ),
    ("Matrix multiplication at a language model's shapes", seed_shapes_text, gemm),
    (
        "Products in rounds",
        "The same products in several rounds, each warm and under sustained load (on a GPU, 10 s of it before the first sample). "
        "The range between rounds, relative to their median, shows how far a single figure in the tables above may be off; the "
        "± there covers less.",
        rounds,
    ),
    (
        "Calls and libraries",
        "The same product through two calls or two libraries. A difference is given where the two 95 % intervals do not overlap.",
        libraries,
    ),
    (
        "Products of the trained models",
        "Forward products of one tensor-parallel rank. Brackets hold the share of the dense peak, where it is known.",
        models,
    ),
    (
        "Attention",
        "Causal, bf16, 32 query heads, 8 key/value heads, head dimension 128; on a GPU 32,768 tokens at every sequence length. "
        "FLOP count half the square; the backward pass counts 2.5 times the forward pass.",
        attention,
    ),
    ("Memory", "Each array that is read or written counts once, as in STREAM.", table_of(("copy", "triad", "fill"), *MEMORY)),
    (
        "Collective operations",
        "Time of the slowest rank. Message sizes and bandwidths follow the definitions of nccl-tests.",
        table_of((*figures.BUS_FACTORS, "collectives"), *COLLECTIVES),
    ),
    (
        "Three-layer network",
        "On a GPU 4096 to 8192 to 8192 to 4096, with ReLU; forward, backward and AdamW, all in bf16. Each weight and sample "
        "counts six FLOP.",
        table_of(["mlp_step"], "weights", "batch", "n", "total time", "samples/s", "step", "rate"),
    ),
    (
        "Transformer training: models",
        "GPT-2's structure with tied embeddings and a learned position for each token of the sequence; on a GPU, GPT-2's "
        "vocabulary of 50,257. Parameters include every weight: embeddings, norms and, as in GPT-2, the biases of linear "
        "layers. The published MI350X counts, `gpt-30m` to `gpt-13b` of `python3 -m tprimat models`, leave out those biases, "
        "which are less than 0.1 %.",
        transformer_models,
    ),
    (
        "Transformer training: results",
        "Plain PyTorch on one device, without compilation or recomputation; weights, gradients and AdamW's states in bf16. "
        "6N counts six FLOP for each parameter and token. Causal counts the weights that multiply a token and half the attention "
        "square. Both shares are of the causal rate: of the data sheet's dense peak, and of the fastest product measured here.",
        table_of(["transformer_step"], *TRAINED, "memory", "step"),
    ),
    (
        "Data-parallel scaling",
        "The same training under DistributedDataParallel, with a constant batch per device.",
        ddp,
    ),
    (
        "Parts of a training step",
        "A step's prediction is the sum of these. Products are named as in training: forward (fprop), gradient of the input "
        "(dgrad), and gradient of the weight with its fp32 sum (wgrad). Grouped products belong to experts, with equal or skewed "
        "numbers of rows. Regions and launches count both passes. At full sizes each is measured for about 0.2 s; products under "
        "load first keep the device busy for 0.4 s.",
        pieces,
    ),
)
"""Title, text or the function that makes it, and the function that makes the tables."""
ON_REQUEST = "Parts of a training step"
"""A page without it is complete."""
SMALL_SIZES = "Small sizes, the default on a CPU, show that everything runs, not how fast it is; `--full` measures full ones."


def page(probes: Probes) -> str:
    """Write the page about the accelerator, driver, power limit and torch version of the newest probe, from one probe or more."""
    return page_of(figures.newest_of_each(probes))


def page_of(chosen: Probes, preface: str = "", appendix: str = "") -> str:
    """Write the page from selected probes, one for each operation at each size, between a preface and an appendix."""
    machine, bodies = chosen[-1].machine, {title: body for title, _, body in sections(chosen)}
    parts = [f"# What {machine.accelerator or machine.platform} reaches", preface, f"## System\n\n{system(chosen)}"]
    parts += [method(chosen), *caution(chosen), "" if machine.platform == "cpu" else f"## Summary\n\n{summary(chosen)}"]
    parts += shown(chosen)
    missing = [title for title, body in bodies.items() if body is None and title != ON_REQUEST]
    parts += [f"Not measured yet: {', '.join(missing)}." if missing else "", appendix]
    return "\n\n".join(filter(None, parts)) + "\n"


def on_a_screen(probes: Probes, screen: Screen) -> str:
    """Write the tables for a terminal, from the newest of each operation."""
    newest = figures.newest_of_each(probes)
    return markdown_as_text("\n\n".join([*caution(newest), *shown(newest)]), screen, LESS_IMPORTANT)


def shown(probes: Probes) -> list[str]:
    """Write the sections for which there are probes."""
    return [f"## {title}\n\n{text}\n\n{body}" for title, text, body in sections(probes) if body]


def sections(probes: Probes) -> list[tuple[str, str, str | None]]:
    """Return title, text and tables of each section; None where nothing was measured."""
    return [(title, text if isinstance(text, str) else text(probes), make(probes)) for title, text, make in SECTIONS]


def caution(probes: Probes) -> list[str]:
    """Say that small sizes measure no speed, where there are some."""
    return [SMALL_SIZES] if any(map(figures.is_small, probes)) else []


def method(probes: Probes) -> str:
    """Say how the operations were timed, by the effort at each choice of sizes."""
    sizes = sorted({figures.is_small(probe) for probe in probes})
    names = {False: "At full sizes", True: "At small sizes"} if len(sizes) > 1 else {}
    on_cpu = probes[-1].machine.platform == "cpu"
    clock = "the host's clock" if on_cpu else "device events"
    parts = ["All figures come from the samples in probes.jsonl.", f"Each repetition is timed with {clock}."]
    parts += [rules(reduced(Effort(), small), names.get(small), small=small) for small in sizes]
    parts += ["Times are medians; ± is half the width of the 95 % interval over consecutive repetitions."]
    parts += [] if on_cpu else ["Peaks are the dense peaks of the data sheet."]
    return " ".join(parts)


def rules(effort: Effort, where: str | None, *, small: bool) -> str:
    """Describe warm-up, the end of repetitions, and the cache."""
    warmup = f"warm-up takes {effort.warmup} calls or {effort.warmup_seconds:g} s"
    text = f"{where}, {warmup}" if where else warmup.capitalize()
    text += f". There are {effort.at_least} to {effort.repetitions} repetitions, which end after {effort.seconds:g} s"
    if effort.relative_interval is not None and effort.repetitions > MIN_SAMPLES_TO_SETTLE:
        width = units.percent(effort.relative_interval, 0)
        text += f" or, from {MIN_SAMPLES_TO_SETTLE} on, once the 95 % interval of the median is narrower than {width}"
    if small:
        text += f"; operations on several ranks always take all {effort.repetitions}."
    else:
        text += ". Searches, training steps and operations on several ranks have rules of their own."
    if not effort.flush:
        return f"{text} The last-level cache is not overwritten between repetitions."
    exempt = "except for training steps and memory operations, whose data exceeds it"
    return f"{text} The last-level cache is overwritten before each repetition, {exempt}."


# The summary.


def summary(probes: Probes) -> str:
    """List one sentence for each kind of operation; empty where nothing was measured."""
    sentences = (
        product_sentences,
        attention_sentences,
        memory_sentences,
        collective_sentences,
        training_sentences,
        scaling_sentences,
    )
    return "\n".join(f"- {line}" for write in sentences for line in write([probe for probe in probes if probe.seconds]))


def product_sentences(probes: Probes) -> list[str]:
    """Name the fastest product in the two dtypes that training multiplies in, and why a faster reading of a search is none."""
    lines = []
    for name in ("bf16", "fp8"):
        best = figures.fastest_product(probes, name)
        if best is None:
            continue
        products = [probe for probe in of_kind(probes, "gemm") if probe.dtype == name]
        mean = figures.mean_rate([probe for probe in products if probe.variant in PLAIN])
        text = f"Matrix products in {name} reach up to {rate_of(best)}, {share(best)} of the dense peak, at {sides(best)}"
        text += f" ({clock(best)})" if clock(best) != units.ABSENT else ""
        lines.append(text + (f"; {units.teraflops(mean)} on average over the table's shapes." if mean else "."))
        brief = figures.fastest([probe for probe in of_kind(probes, "gemm_search") if probe.dtype == name])
        if brief is None or figures.fastest([best, brief]) is best:
            continue
        again = figures.fastest([probe for probe in products if probe.shape == brief.shape])
        text = f"The search for a {name} shape read up to {rate_of(brief)} at {sides(brief)} in {len(brief.seconds)} calls"
        settled = f"; timed at length, that product reaches {rate_of(again)} ({clock(again)})" if again else ""
        lines.append(f"{text} ({clock(brief)}){settled}. A search does not count.")
    return lines


def attention_sentences(probes: Probes) -> list[str]:
    """Name the fastest backend, forward and backward."""
    best = {name: figures.fastest(of_kind(probes, f"attention_{name}")) for name in ("forward", "backward")}
    return [
        f"Attention {name} reaches up to {rate_of(one)}, with {one.variant} at {one.shape['sequence']:,} tokens."
        for name, one in best.items()
        if one
    ]


def memory_sentences(probes: Probes) -> list[str]:
    """Name the fastest of the three access patterns."""
    patterns = of_kind(probes, "copy", "triad", "fill")
    best = max(patterns, key=lambda probe: figures.share_of_bandwidth(probe) or 0.0, default=None)
    part = figures.share_of_bandwidth(best) if best else None
    if best is None or part is None:
        return []
    return [f"Memory moves up to {bandwidth(best)} ({best.kind}), {units.percent(part)} of the data sheet."]


def collective_sentences(probes: Probes) -> list[str]:
    """Give the bus bandwidth of the largest all-reduce for each number of ranks."""
    by_size = sorted(of_kind(probes, "all_reduce"), key=lambda probe: probe.shape["message_bytes"])
    largest = {probe.shape["ranks"]: probe for probe in by_size}
    return [
        f"An all-reduce of {units.message_size(one.shape['message_bytes'])} over {ranks} devices reaches a bus bandwidth of "
        f"{units.si(figures.bus_bandwidth(one), 'B/s')} ({one.variant})."
        for ranks, one in sorted(largest.items())
    ]


def training_sentences(probes: Probes) -> list[str]:
    """Name the transformer with the highest utilization, and relate it to the fastest product."""
    best = figures.fastest(of_kind(probes, "transformer_step"))
    if best is None:
        return []
    text = f"A training step of the {best.variant} transformer reaches {rate_of(best)}, {share(best)} of the dense peak"
    measured = figures.share_of_fastest_product(best, probes)
    return [text + ("." if measured is None else f" and {units.percent(measured)} of the fastest product above.")]


def scaling_sentences(probes: Probes) -> list[str]:
    """Give the efficiency of data parallelism on the most devices."""
    lines = []
    steps = of_kind(probes, "ddp_step")
    for name in dict.fromkeys(probe.variant for probe in steps):
        same = [probe for probe in steps if probe.variant == name]
        most = max(same, key=lambda probe: probe.shape["ranks"])
        part, ranks = figures.scaling_efficiency(most, same), most.shape["ranks"]
        if part is not None and ranks > 1:
            lines.append(f"Data-parallel training of {name} scales to {ranks} devices at {units.percent(part)} efficiency.")
    return lines
