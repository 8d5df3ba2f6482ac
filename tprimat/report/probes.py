"""One Markdown page about an accelerator, from its probes: how fast single operations and small training loops run."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tprimat.analyze import probes as figures
from tprimat.core import units
from tprimat.core.flops import SEED_SHAPES
from tprimat.predict.rates import product_of, under_load
from tprimat.records.schema import ProbeRecord
from tprimat.report.tables import Screen, columns, plural, table

Probes = Sequence[ProbeRecord]

DESCRIPTIONS = {shape: name for name, shape in SEED_SHAPES.items()}
PLAIN = ("torch.matmul", "scaled_mm tensor-wise")
DTYPES = ("bf16", "fp8", "fp16", "tf32", "fp32")
OUT_OF_MEMORY = re.compile(r"(out of memory)\..*", re.DOTALL)
"""The sizes that the allocator adds differ from call to call."""
LESS_IMPORTANT = ("n", "clock, power", "memory", "bandwidth", "median time", "description")
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


def _speed(probe: ProbeRecord) -> str:
    if "launches" in probe.shape:
        return f"{units.count(figures.per_second(probe.shape['launches'], probe))} launches/s"
    return units.si(figures.bus_bandwidth(probe) or figures.bandwidth(probe), "B/s") if probe.bytes else rate_of(probe)


def _efficiency(probe: ProbeRecord, probes: Probes) -> float | None:
    same = [other for other in of_kind(probes, probe.kind) if other.variant == probe.variant and other.seconds]
    return figures.scaling_efficiency(probe, same)


def _size(name: str) -> "Cell":
    return lambda probe, _: units.count(probe.shape.get(name))


Cell = Callable[[ProbeRecord, Probes], str]
TEXT: dict[str, Cell] = {
    "(m, k, n)": lambda probe, _: str(_sides(probe)),
    "description": lambda probe, _: DESCRIPTIONS.get(_sides(probe), units.ABSENT),
    "piece": lambda probe, _: probe.kind.replace("_", " ") + (", fp8" if probe.dtype == "fp8" else ""),
    "size": lambda probe, _: ", ".join(f"{name} {value:,}" for name, value in probe.shape.items()),
    "dtype": lambda probe, _: probe.dtype,
    "pass": lambda probe, _: probe.kind.removeprefix("attention_"),
    "operation": lambda probe, _: probe.kind,
    "TP": lambda probe, _: f"TP {probe.shape['tensor_parallel']}",
    **dict.fromkeys(("of", "library", "model", "product"), lambda probe, _: probe.variant or units.ABSENT),
}
CELLS: dict[str, Cell] = {
    **TEXT,
    **{name: _size(name) for name in ("batch", "sequence", "ranks", "parameters", "weights")},
    "tokens": _size("m"),
    "array": lambda probe, _: units.message_size(probe.shape["array_bytes"]),
    "message": lambda probe, _: units.message_size(probe.shape["message_bytes"]),
    "n": lambda probe, _: str(len(probe.seconds)),
    "median time": lambda probe, _: time_of(probe),
    "rate": lambda probe, _: _speed(probe),
    "rate, 6N": lambda probe, _: units.teraflops(figures.six_n_rate(probe)),
    "of dense peak": lambda probe, _: units.percent(figures.share_of_peak(probe)),
    "of fastest product": lambda probe, probes: units.percent(figures.share_of_fastest_product(probe, probes)),
    "scaling efficiency": lambda probe, probes: units.percent(_efficiency(probe, probes)),
    "bandwidth": lambda probe, _: units.si(figures.bandwidth(probe), "B/s"),
    "bus bandwidth": lambda probe, _: units.si(figures.bus_bandwidth(probe), "B/s"),
    "of data sheet": lambda probe, _: units.percent(figures.share_of_bandwidth(probe)),
    "samples/s": lambda probe, _: units.count(figures.samples_per_second(probe)),
    "tokens/s": lambda probe, _: units.count(figures.tokens_per_second(probe)),
    "memory": lambda probe, _: units.gibibytes(probe.peak_allocated_bytes),
    "clock, power": lambda probe, _: _clock(probe),
}
"""Heading -> cell of a probe among all probes."""


def _with_share(probe: ProbeRecord) -> str:
    share = figures.share_of_peak(probe)
    return rate_of(probe) + ("" if share is None else f" ({units.percent(share)})")


# Sections.


def _fastest(probes: Probes) -> Probes:
    """Choose the fastest of each operation in each dtype; on a CPU, which shows no speed, none."""
    best = {}
    for probe in sorted(probes, key=lambda probe: figures.bus_bandwidth(probe) or figures.flop_rate(probe) or 0.0):
        dtype = (*DTYPES, probe.dtype).index(probe.dtype)
        best[SUMMARIZED.index(probe.kind), dtype, probe.shape.get("ranks", 0)] = probe
    return [best[key] for key in sorted(best) if best[key].machine.platform != "cpu"]


def _products(probes: Probes) -> Probes:
    """Choose the plain call, fastest first in each dtype."""
    chosen = [probe for probe in probes if probe.dtype in DTYPES and probe.variant in PLAIN]
    return sorted(chosen, key=lambda probe: (DTYPES.index(probe.dtype), -(figures.flop_rate(probe) or 0.0)))


def _in_several_libraries(probes: Probes) -> Probes:
    """Choose the bf16 products of shapes that several calls or libraries computed."""
    products = [probe for probe in probes if probe.dtype == "bf16" and not (probe.variant or "").endswith("ed")]
    shapes = [_sides(probe) for probe in products]
    return [probe for probe in products if shapes.count(_sides(probe)) > 1]


def _once(probes: Probes) -> Probes:
    """Leave out bursts of products that were also measured under load."""
    loaded = {product_of(probe) for probe in probes if under_load(probe)}
    return [probe for probe in probes if under_load(probe) or product_of(probe) not in loaded]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table about probes of some kinds: a row for each one, or for each choice of `headings` where they are crossed."""

    title: str
    text: str
    kinds: tuple[str, ...]
    headings: tuple[str, ...]
    crossed: str = ""
    """A heading whose cells make a column each, with the rates in it."""
    chosen: Callable[[Probes], Probes] = list
    """Of those that were measured, which to show, in this order."""
    cell: Callable[[ProbeRecord], str] = rate_of
    """Of a crossed table."""

    def table(self, probes: Probes) -> tuple[list[str], list[list[str]], int]:
        """Return the table's header, its rows, none where nothing was measured, and how many of the first columns are text."""
        left = sum(heading in TEXT for heading in self.headings) or 1
        chosen = self.chosen([probe for probe in of_kind(probes, *self.kinds) if probe.seconds])
        cells = [[CELLS[heading](probe, probes) for heading in self.headings] for probe in chosen]
        if not self.crossed:
            return [*self.headings], cells, left
        crossed: dict[tuple[str, ...], dict[str, str]] = {}
        for probe, row in zip(chosen, cells, strict=True):
            crossed.setdefault(tuple(row), {})[CELLS[self.crossed](probe, probes)] = self.cell(probe)
        names = list(dict.fromkeys(name for row in crossed.values() for name in row))
        rows = [[*row, *(of.get(name, units.ABSENT) for name in names)] for row, of in crossed.items()]
        return [*self.headings, *names], rows, left


SUMMARIZED = ("gemm", "attention_forward", "attention_backward", "fill", "all_reduce", "transformer_step")
SECTIONS = (
    Section(
        title="Summary",
        text="The fastest of each operation; of an all-reduce its bus bandwidth.",
        kinds=SUMMARIZED,
        headings=("operation", "dtype", "of", "ranks", "rate", "of dense peak"),
        chosen=_fastest,
    ),
    Section(
        title="Matrix multiplication at a language model's shapes",
        text="(m, k) times (k, n): shapes of Llama 70B under eight-way tensor parallelism and three squares, as in "
        "SemiAnalysis's comparison of 2024-12-22; small sizes are about a 64th of each side.",
        kinds=("gemm",),
        headings=("dtype", "(m, k, n)", "description", "median time", "n", "rate", "of dense peak", "clock, power"),
        chosen=_products,
    ),
    Section(
        title="Calls and libraries",
        text="The same product through several calls and libraries, in bf16.",
        kinds=("gemm",),
        headings=("(m, k, n)",),
        crossed="library",
        chosen=_in_several_libraries,
    ),
    Section(
        title="Products of the trained models",
        text="Of one tensor-parallel rank, forward; in brackets: of the dense peak.",
        kinds=("model_gemm",),
        headings=("product", "dtype", "tokens"),
        crossed="TP",
        chosen=lambda probes: sorted(probes, key=lambda probe: probe.shape["tensor_parallel"]),
        cell=_with_share,
    ),
    Section(
        title="Attention",
        text="Causal, bf16, 32 query heads, 8 key/value heads, head dimension 128; on a GPU 32,768 tokens at every sequence "
        "length. FLOP count half the square; the backward pass counts 2.5 times the forward pass.",
        kinds=("attention_forward", "attention_backward"),
        headings=("pass", "sequence"),
        crossed="library",
        chosen=lambda probes: sorted(probes, key=lambda probe: (probe.kind != "attention_forward", probe.shape["sequence"])),
    ),
    Section(
        title="Memory",
        text="Each array that is read or written counts once, as in STREAM.",
        kinds=("copy", "triad", "fill"),
        headings=("operation", "array", "median time", "bandwidth", "of data sheet"),
    ),
    Section(
        title="Collective operations",
        text="Time of the slowest rank. Message sizes and bandwidths follow the definitions of nccl-tests.",
        kinds=tuple(figures.BUS_FACTORS),
        headings=("operation", "library", "ranks", "message", "median time", "bandwidth", "bus bandwidth"),
    ),
    Section(
        title="Three-layer network",
        text="On a GPU 4096 to 8192 to 8192 to 4096, with ReLU, in bf16 with AdamW. Each weight and sample counts six FLOP.",
        kinds=("mlp_step",),
        headings=("weights", "batch", "n", "samples/s", "median time", "rate"),
    ),
    Section(
        title="Transformer training: results",
        text="GPT-2's structure in plain PyTorch on one device, without compilation or recomputation, all states in bf16. 6N "
        "counts six FLOP for each parameter and token; causal counts the weights that multiply a token and half the attention "
        "square.",
        kinds=("transformer_step",),
        headings=(
            *("model", "parameters", "batch", "sequence", "tokens/s", "rate, 6N", "rate", "of dense peak"),
            *("of fastest product", "memory", "median time"),
        ),
    ),
    Section(
        title="Data-parallel scaling",
        text="The same under DistributedDataParallel, with a constant batch per device.",
        kinds=("ddp_step",),
        headings=("model", "ranks", "batch", "tokens/s", "rate, 6N", "memory", "scaling efficiency", "median time"),
        chosen=lambda probes: sorted(probes, key=lambda probe: (probe.shape["parameters"], probe.shape["ranks"])),
    ),
    Section(
        title="Parts of a training step",
        text="A step's prediction is the sum of these: products forward (fprop), of the input's gradient (dgrad) and of the "
        "weight's with its fp32 sum (wgrad); grouped ones belong to experts. Regions and launches count both passes.",
        kinds=("fprop", "dgrad", "wgrad", "grouped_fprop", "grouped_dgrad", "grouped_wgrad", "region", "launch", "overlapped"),
        headings=("piece", "of", "size", "median time", "rate"),
        chosen=_once,
    ),
)
SMALL_SIZES = "Small sizes, as on a CPU, show that everything runs, not how fast it is."


# The page.


def page(probes: Probes) -> str:
    """Write the page about the accelerator, driver, power limit and torch version of the newest probe, from one probe or more."""
    return page_of(figures.newest_of_each(probes))


def page_of(chosen: Probes, preface: str = "", appendix: str = "") -> str:
    """Write the page from selected probes, one for each operation at each size, between a preface and an appendix."""
    machine = chosen[-1].machine
    timer = "the host's clock" if machine.platform == "cpu" else "device events, and peaks are the dense peaks of the data sheet"
    parts = [f"# What {machine.accelerator or machine.platform} reaches", preface, "## System", _system(chosen)]
    others = [one for one in figures.settings_of(chosen) if one != figures.setting_of(chosen[-1].machine, chosen[-1].software)]
    parts += [f"Some figures were measured under driver {one.driver} with torch {one.torch}." for one in others]
    parts.append(
        f"All figures come from the samples in probes.jsonl. Times are medians of n repetitions, by {timer}; "
        "± is half the width of the 95 % interval over consecutive repetitions."
    )
    parts += caution(chosen)
    for section in SECTIONS:
        header, rows, left = section.table(chosen)
        parts += [f"## {section.title}", section.text, table(header, rows, left)] if rows else []
    refused = "\n".join(f"- {line}" for line in refusals(chosen))
    return "\n\n".join(filter(None, [*parts, refused and "## Not measured", refused, appendix])) + "\n"


def on_a_screen(probes: Probes, screen: Screen) -> str:
    """Write the tables for a terminal, from the newest of each operation."""
    newest = figures.newest_of_each(probes)
    parts = [screen.prose(line) for line in caution(newest)]
    for section in SECTIONS:
        header, rows, left = section.table(newest)
        if rows:
            shown = columns(header, rows, left=left, screen=screen, drop=LESS_IMPORTANT)
            parts.append(f"{screen.paint(section.title, 'heading')}\n{shown}")
    return "\n\n".join([*parts, *(screen.prose(f"not measured: {line}", 2) for line in refusals(newest))])


def refusals(probes: Iterable[ProbeRecord]) -> list[str]:
    """Say what was refused, one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for probe in probes:
        if probe.error:
            length = f" at {probe.shape['sequence']:,}" if "sequence" in probe.shape else ""
            length += f" on {plural(probe.shape['ranks'], 'rank')}" if "ranks" in probe.shape else ""
            reason = OUT_OF_MEMORY.sub(r"\1.", probe.error)
            reasons.setdefault(reason, []).append(f"{probe.variant or probe.kind} {probe.dtype}{length}")
    return [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]


def _system(probes: Probes) -> str:
    newest = max(probes, key=lambda probe: probe.started_at)
    machine = newest.machine
    rows = [
        ["accelerator", machine.accelerator or units.ABSENT],
        ["devices used (maximum)", units.count(max(probe.machine.gpus or 1 for probe in probes))],
        ["memory per device", units.gibibytes(machine.memory_bytes)],
        ["power limit", units.si(machine.power_limit_watts, "W")],
        ["driver", machine.driver or units.ABSENT],
        *([name, version] for name, version in sorted(newest.software.items())),
        ["measured", f"{min(probe.started_at for probe in probes)} to {newest.started_at}"],
    ]
    return table(["property", "value"], rows, left=2)


def caution(probes: Probes) -> list[str]:
    """Say that small sizes measure no speed, where there are some."""
    return [SMALL_SIZES] if any(map(figures.is_small, probes)) else []
