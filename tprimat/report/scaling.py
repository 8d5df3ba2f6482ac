"""Report scaling as text, Markdown or JSON."""

from collections.abc import Callable, Sequence
from typing import Any

from tprimat.analyze.scaling import LeftOut, Row, ScalingKind, Series, serial_share
from tprimat.core import units
from tprimat.core.rows import placed
from tprimat.records.schema import Estimate
from tprimat.report import tables
from tprimat.report.catalogue import CPU_CAUTION, TOKENS, TOKENS_OF_ALL, per_rank
from tprimat.report.tables import PLAIN, Screen, columns, with_interval
from tprimat.report.words import finding_words, values_in_words

KINDS: dict[ScalingKind, str] = {
    "weak": "Weak scaling: every GPU has the same work, and the batch grows.",
    "strong": "Strong scaling: one batch, divided among more GPUs.",
}
MOST_LEFT_OUT = 4
"""Configurations that are named for each reason why they are no point; more are counted."""
HEADER = ("Configuration", "Tokens processed", "Tokens/s", "per GPU", "Multiplier", "Efficiency")
DROP = ("Tokens processed", "per GPU")
"""Columns in the order in which a narrow terminal loses them."""


def on_ranks(words: str, *some: Series) -> str:
    """Return words on GPUs, on processes where every series ran on a CPU."""
    return per_rank(words, ("cpu" if series.on_cpu else "" for series in some))


def configuration(gpus: int, nodes: int | None) -> str:
    """Return a configuration such as 8 GPUs across 2 nodes."""
    return tables.plural(gpus, "GPU") + ("" if nodes is None else f" across {tables.plural(nodes, 'node')}")


def _cells(row: Row) -> list[str]:
    point = row.point
    return [
        configuration(point.gpus, point.nodes),
        units.count(point.tokens),
        cell(point.tokens_per_second, TOKENS_OF_ALL.show),
        TOKENS.show(point.per_gpu),
        cell(row.multiplier, lambda times: f"{times:.2f}"),
        cell(row.efficiency, units.percent),
    ]


def cell(value: Estimate, show: Callable[[float], str]) -> str:
    """Return a number with its interval; the point that the others are relative to has none."""
    return show(value.value) if value.low is None else with_interval(value, show)


def text(all_series: Sequence[Series], screen: Screen = PLAIN) -> str:
    """Format tables for a terminal."""
    blocks = []
    for series in all_series:
        header, *rows = ([on_ranks(cell, series) for cell in line] for line in (HEADER, *map(_cells, series.rows)))
        table = columns(header, rows, screen=screen, drop=[on_ranks(name, series) for name in DROP])
        notes = [screen.prose(line, 2) for line in remarks(series)]
        blocks.append("\n".join([screen.prose(series.name), table, *notes]))
    return "\n\n".join(blocks) + "\n"


def remarks(series: Series, most: int | None = MOST_LEFT_OUT) -> list[str]:
    """Describe the kind of scaling and the law that fits it; name what is no point."""
    lines = [KINDS[series.kind], *([CPU_CAUTION] if series.on_cpu else [])]
    if series.differing:
        traits = ", ".join(f"{name} ({values_in_words(name, words)})" for name, words in series.differing.items())
        lines.append(f"Caution, the points also differ in {traits}.")
    share = serial_share(series)
    law = f"{cell(share, units.percent)} of the work is not shared by GPUs{', from two points alone' * (share.low is None)}"
    lines += [repetition(series), f"Amdahl's law: {law if share.value >= 0 else 'throughput grows by more than the GPUs'}."]
    return [*(on_ranks(line, series) for line in lines), *left_out(series.left_out, most)]


def repetition(series: Series) -> str:
    """Say how many runs are behind each point, and so what its interval covers."""
    runs = [point.runs for point in series.points]
    count = f"{' to '.join(dict.fromkeys((str(min(runs)), str(max(runs)))))} {'run' if max(runs) == 1 else 'runs'} per point"
    if min(runs) > 1:
        return f"{count}: intervals are between runs."
    spread = units.percent(max(point.assumed_spread for point in series.points))
    several = "" if max(runs) == 1 else "between runs, or "
    covered = f"{count}: intervals are {several}between the steps of one."
    return f"{covered} Multiplier and efficiency assume that single runs vary by {spread}."


def left_out(some: Sequence[LeftOut], most: int | None = MOST_LEFT_OUT) -> list[str]:
    """Name configurations that are no point, by the reason; count those beyond the first."""
    reasons: dict[str, list[str]] = {}
    for name, gpus, why in some:
        reasons.setdefault(finding_words(why), []).append(f"{name} ({units.count(gpus)} GPU{'s' * (gpus != 1)})")
    lines = []
    for words, names in reasons.items():
        rest = f", and {len(names) - most} more" if most is not None and len(names) > most else ""
        lines.append(f"Not a point here, {words}: {', '.join(names[:most])}{rest}.")
    return lines


def as_document(all_series: Sequence[Series]) -> list[dict[str, Any]]:
    """Return the series as data, unrounded."""
    return [
        {
            "name": series.name,
            "kind": series.kind,
            "points": [placed("documents.scaling_point", row=row) | {"layout": row.point.layout or None} for row in series.rows],
            "left_out": [{"name": name, "gpus": gpus, "why": finding_words(why)} for name, gpus, why in series.left_out],
            "serial_share": placed("documents.interval", of=serial_share(series)),
            "remarks": remarks(series, None),
        }
        for series in all_series
    ]
