"""One Markdown page about an accelerator, from its probes: how fast single operations and small training loops run."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tprimat.analyze import probes as figures
from tprimat.core import units
from tprimat.core.flops import seed_shapes
from tprimat.core.rows import DATA, document
from tprimat.predict.rates import product_of, under_load
from tprimat.records.schema import ProbeRecord
from tprimat.report.tables import Screen, columns, plural, table

Probes = Sequence[ProbeRecord]

PLAIN = ("torch.matmul", "scaled_mm tensor-wise")
DTYPES = ("bf16", "fp8", "fp16", "tf32", "fp32")
OUT_OF_MEMORY = re.compile(r"(out of memory)\..*", re.DOTALL)
"""The sizes that the allocator adds differ from call to call."""
LESS_IMPORTANT = ("n", "clock, power", "memory", "bandwidth", "median time", "description")
"""Columns in the order in which a narrow terminal loses them."""


# Cells.


def _time_of(probe: ProbeRecord) -> str:
    time = figures.median_seconds(probe)
    if time is None or time.low is None or time.high is None:
        return units.seconds(time.value) if time else units.ABSENT
    half = (time.high - time.low) / 2 / time.value
    return f"{units.seconds(time.value)} ± {'over 100 %' if half > 1 else units.percent(half)}"


def rate_of(probe: ProbeRecord) -> str:
    """Format FLOP/s, or a dash for a refusal."""
    return units.teraflops(figures.flop_rate(probe))


def _clock(probe: ProbeRecord) -> str:
    read = ((probe.clock_hertz, "Hz"), (probe.power_watts, "W"))
    return ", ".join(units.si(value, unit) for value, unit in read if value is not None) or units.ABSENT


def _sides(probe: ProbeRecord) -> tuple[int, int, int]:
    return probe.shape["m"], probe.shape["k"], probe.shape["n"]


def _speed(probe: ProbeRecord) -> str:
    if "launches" in probe.shape:
        return f"{units.count(figures.per_second(probe.shape['launches'], probe))} launches/s"
    return units.si(figures.bus_bandwidth(probe) or figures.bandwidth(probe), "B/s") if probe.bytes else rate_of(probe)


def _size(name: str) -> "ProbeCell":
    return lambda probe, _: units.count(probe.shape.get(name))


ProbeCell = Callable[[ProbeRecord, Probes], str]
TEXT: dict[str, ProbeCell] = {
    "(m, k, n)": lambda probe, _: str(_sides(probe)),
    "description": lambda probe, _: next((name for name, sides in seed_shapes().items() if sides == _sides(probe)), units.ABSENT),
    "piece": lambda probe, _: probe.kind.replace("_", " ") + (", fp8" if probe.dtype == "fp8" else ""),
    "size": lambda probe, _: ", ".join(f"{name} {value:,}" for name, value in probe.shape.items()),
    "dtype": lambda probe, _: probe.dtype,
    "pass": lambda probe, _: probe.kind.removeprefix("attention_"),
    "operation": lambda probe, _: probe.kind,
    "TP": lambda probe, _: f"TP {probe.shape['tensor_parallel']}",
    **dict.fromkeys(("of", "library", "model", "product"), lambda probe, _: probe.variant or units.ABSENT),
}
CELLS: dict[str, ProbeCell] = {
    **TEXT,
    **{name: _size(name) for name in ("batch", "sequence", "ranks", "parameters", "weights")},
    "tokens": _size("m"),
    "array": lambda probe, _: units.message_size(probe.shape["array_bytes"]),
    "message": lambda probe, _: units.message_size(probe.shape["message_bytes"]),
    "n": lambda probe, _: str(len(probe.seconds)),
    "median time": lambda probe, _: _time_of(probe),
    "rate": lambda probe, _: _speed(probe),
    "rate, 6N": lambda probe, _: units.teraflops(figures.six_n_rate(probe)),
    "of dense peak": lambda probe, _: units.percent(figures.share_of_peak(probe)),
    "of fastest product": lambda probe, probes: units.percent(figures.share_of_fastest_product(probe, probes)),
    "scaling efficiency": lambda probe, probes: units.percent(figures.scaling_efficiency(probe, probes)),
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


SUMMARIZED = ("gemm", "attention_forward", "attention_backward", "fill", "all_reduce", "transformer_step")
CHOSEN: dict[str, Callable[[Probes], Probes]] = {
    "fastest": _fastest,
    "plain": _products,
    "several libraries": _in_several_libraries,
    "once": _once,
    "by tensor parallelism": lambda probes: sorted(probes, key=lambda probe: probe.shape["tensor_parallel"]),
    "forward first": lambda probes: sorted(probes, key=lambda one: (one.kind != "attention_forward", one.shape["sequence"])),
    "by size and ranks": lambda probes: sorted(probes, key=lambda probe: (probe.shape["parameters"], probe.shape["ranks"])),
}


SECTIONS: Sequence[Mapping[str, Any]] = document(DATA / "probe_sections.yaml")["sections"]


def _table(section: Mapping[str, Any], probes: Probes) -> tuple[list[str], list[list[str]], int]:
    """Return a section's header, its rows, none where nothing was measured, and how many of the first columns are text.

    There is a row for each probe; where the section is `crossed`, for each choice of `headings`, and a column of rates for each
    cell of that heading.
    """
    headings, choose = section["headings"], CHOSEN.get(section.get("chosen", ""), list)
    left = sum(heading in TEXT for heading in headings) or 1
    chosen = choose([probe for probe in probes if probe.kind in section["kinds"] and probe.seconds])
    cells = [[CELLS[heading](probe, probes) for heading in headings] for probe in chosen]
    if "crossed" not in section:
        return headings, cells, left
    rate = _with_share if "cell" in section else rate_of
    crossed: dict[tuple[str, ...], dict[str, str]] = {}
    for probe, row in zip(chosen, cells, strict=True):
        crossed.setdefault(tuple(row), {})[CELLS[section["crossed"]](probe, probes)] = rate(probe)
    names = list(dict.fromkeys(name for row in crossed.values() for name in row))
    rows = [[*row, *(of.get(name, units.ABSENT) for name in names)] for row, of in crossed.items()]
    return [*headings, *names], rows, left


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
        header, rows, left = _table(section, chosen)
        parts += [f"## {section['title']}", section["text"], table(header, rows, left)] if rows else []
    refused = "\n".join(f"- {line}" for line in refusals(chosen))
    return "\n\n".join(filter(None, [*parts, refused and "## Not measured", refused, appendix])) + "\n"


def on_a_screen(probes: Probes, screen: Screen) -> str:
    """Write the tables for a terminal, from the newest of each operation."""
    newest = figures.newest_of_each(probes)
    parts = [screen.prose(line) for line in caution(newest)]
    for section in SECTIONS:
        header, rows, left = _table(section, newest)
        if rows:
            shown = columns(header, rows, left=left, screen=screen, drop=LESS_IMPORTANT)
            parts.append(f"{section['title']}\n{shown}")
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
    """Say that small sizes measure no speed, where there are some; older records do not say it, and a processor had them."""
    small = (probe.machine.platform == "cpu" if probe.small is None else probe.small for probe in probes)
    return [SMALL_SIZES] if any(small) else []
