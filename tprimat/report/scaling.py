"""Report scaling as text, Markdown or JSON."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tprimat.analyze.compare import why_so_much
from tprimat.analyze.scaling import Fit, Kind, LeftOut, Row, Series
from tprimat.core import units
from tprimat.records.schema import Estimate
from tprimat.report import tables
from tprimat.report.catalogue import CPU_CAUTION, TOKENS, TOKENS_OF_ALL, per_rank
from tprimat.report.screen import PLAIN, Screen
from tprimat.report.tables import columns, with_interval

KINDS: dict[Kind, str] = {
    "weak": "weak scaling: every GPU has the same work, and the batch grows",
    "strong": "strong scaling: one batch, divided among more GPUs",
    "mixed": "neither weak nor strong: work grows, but not with the GPUs, so that efficiency mixes two causes",
    "unknown": "the work of a step is not recorded, so that weak and strong cannot be told apart",
}
LOOSE_FIT = 0.03
"""Relative deviation from which a law does not describe a series."""
EXACT = 1e-9
"""Relative deviation of a curve that goes through all points."""
SUPERLINEAR = 1.05
"""Efficiency from which a series is asked what else changed."""
HEADER = (
    "Configuration",
    "Total tokens",
    "Tokens/s",
    "per GPU",
    "Elapsed (s)",
    "Elapsed (min)",
    "Multiplier",
    "Efficiency",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSeries:
    """A series with the laws that could be fitted to it."""

    series: Series
    fits: Sequence[Fit]


def configuration(gpus: int, nodes: int | None) -> str:
    """Return a configuration such as 8 GPUs across 2 nodes."""
    across = "" if nodes is None else f" across {nodes} node{'s' * (nodes > 1)}"
    return f"{gpus} GPU{'s' * (gpus > 1)}{across}"


def on_ranks(series: Series, words: str) -> str:
    """Return words on GPUs, on processes where the series ran on a CPU."""
    return per_rank(words, {"cpu"} if series.on_cpu else ())


def table_of(series: Series) -> list[list[str]]:
    """Return the cells of a series below its header."""
    return [[on_ranks(series, cell) for cell in line] for line in (HEADER, *map(_cells, series.rows))]


def _cells(row: Row) -> list[str]:
    point = row.point
    seconds = point.seconds
    return [
        configuration(point.gpus, point.nodes),
        units.count(point.tokens),
        cell(point.tokens_per_second, TOKENS_OF_ALL.show),
        TOKENS.show(point.per_gpu),
        units.ABSENT if seconds is None else f"{seconds:.2f}",
        units.ABSENT if seconds is None else f"{seconds / 60:.1f}",
        cell(row.multiplier, times),
        cell(row.efficiency, units.percent),
    ]


def times(multiplier: float) -> str:
    """Format a multiplier."""
    return f"{multiplier:.2f}"


def cell(value: Estimate, show: Callable[[float], str]) -> str:
    """Return a number with its interval; printed figures, and the point that the others are relative to, have none."""
    return show(value.value) if value.low is None else with_interval(value, show)


DROP = ("Total tokens", "Elapsed (s)", "Elapsed (min)", "per GPU")
"""Columns in the order in which a narrow terminal loses them."""
ELAPSED = {"Elapsed (s)", "Elapsed (min)"}
"""Columns that a terminal shows of printed figures only: those of measured points are tokens over throughput."""


def text(found: Sequence[FittedSeries], screen: Screen = PLAIN) -> str:
    """Format tables and fitted laws for a terminal."""
    blocks = []
    for scaled in found:
        hidden = ELAPSED if any(point.runs for point in scaled.series.points) else set()
        shown = [number for number, name in enumerate(HEADER) if name not in hidden]
        header, *rows = ([line[number] for number in shown] for line in table_of(scaled.series))
        drop = [on_ranks(scaled.series, name) for name in DROP]
        table = columns(header, rows, screen=screen, drop=drop)
        notes = [screen.prose(line, 2) for line in remarks(scaled)]
        blocks.append("\n".join([screen.prose(scaled.series.name, meaning="heading"), table, *notes]))
    return "\n\n".join(blocks) + "\n"


def as_markdown(found: Sequence[FittedSeries]) -> str:
    """Format tables and fitted laws as Markdown."""
    blocks = []
    for scaled in found:
        header, *rows = table_of(scaled.series)
        table = tables.table(header, rows)
        lines = (f"- {tables.escaped(line)}" for line in remarks(scaled))
        blocks.append("\n".join([f"### {tables.escaped(scaled.series.name)}", "", table, "", *lines]))
    return "\n\n".join(blocks) + "\n"


def remarks(scaled: FittedSeries, *, all_left_out: bool = False) -> list[str]:
    """Describe the kind of scaling and the fitted laws; sum up what is no point, unless all of that is wanted."""
    series = scaled.series
    lines = [KINDS[series.kind][0].upper() + KINDS[series.kind][1:] + ".", *([CPU_CAUTION] if series.on_cpu else [])]
    layouts = {point.layout.rsplit(" DP", 1)[0] for point in series.points if point.layout}
    if len(layouts) > 1:
        each = ", ".join(f"{point.gpus} GPUs {point.layout}" for point in series.points)
        lines.append(f"Layouts differ, so that part of the difference is theirs: {each}.")
    if series.differing:
        lines.append(f"Caution, the points also differ in {', '.join(series.differing)}.")
    if (most := max(row.efficiency.value for row in series.rows)) > SUPERLINEAR:
        lines.append(f"More than proportional ({units.percent(most)}): something else differs, or the first point is slow.")
    lines += list(filter(None, (repetition(series), assumption(series))))
    few = all_left_out or len(series.left_out) <= MOST_LEFT_OUT
    left_out = list(map(left_out_words, series.left_out)) if few else [summed_up(series.left_out)]
    return [*(on_ranks(series, line) for line in lines), *left_out, *_laws(scaled)]


def _laws(scaled: FittedSeries) -> list[str]:
    series = scaled.series
    lines = [line for found in scaled.fits for line in _law(found, len(series.points))]
    if scaled.fits and min(found.deviation for found in scaled.fits) > LOOSE_FIT:
        lines.append(f"Neither law fits the points within {units.percent(LOOSE_FIT, 0)}: do not extrapolate with them.")
    if not scaled.fits or len(series.points) < 4:
        lines.append(f"{len(series.points)} numbers of GPUs say little about a law; 4 or more bound its parameters.")
    return [on_ranks(series, line) for line in lines]


def repetition(series: Series) -> str:
    """Say how many runs are behind each point, and so what its interval covers; empty for printed figures."""
    runs = [point.runs for point in series.points if point.runs is not None]
    if not runs:
        return ""
    if max(runs) == 1:
        return "One run per point: the interval covers its steps, not the next run."
    count = f"{min(runs)} to {max(runs)}" if min(runs) < max(runs) else str(runs[0])
    single = "; where there is one, that of its steps" if min(runs) == 1 else ""
    return f"{count} runs per point: intervals are between runs{single}."


def assumption(series: Series) -> str:
    """Say what the intervals of multiplier and efficiency assume; empty where no point has a single run."""
    if all(point.runs != 1 for point in series.points):
        return ""
    spread = max(point.assumed_spread for point in series.points)
    return f"Multiplier and efficiency assume that single runs vary by {units.percent(spread)}{why_so_much(spread)}."


MOST_LEFT_OUT = 4
"""Configurations that are no point and that are each named; more are summed up."""
WHERE_ALL = "--format json names each."


def summed_up(left_out: Sequence[LeftOut]) -> str:
    """Return how many configurations are no point of a series, by reason, with an example of each."""
    return f"Not points here are {len(left_out)} configurations: {', '.join(reasons(left_out))}. {WHERE_ALL}"


def reasons(left_out: Sequence[LeftOut]) -> list[str]:
    """Return each reason why configurations are no point, the most frequent first: '12 differing in strategy (such as ...)'."""
    found: dict[str, list[LeftOut]] = {}
    for one in left_out:
        found.setdefault(one.reason, []).append(one)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return [f"{len(several)} {reason} ({'such as ' * (len(several) > 1)}{_named(several[0])})" for reason, several in ordered]


def _named(one: LeftOut) -> str:
    return one.name if one.gpus is None else f"{one.name} on {configuration(one.gpus, None)}"


def left_out_words(one: LeftOut) -> str:
    """Name a configuration that is not a point of a series, and why."""
    count = "GPUs not known" if one.gpus is None else configuration(one.gpus, None)
    return f"Not a point here: {one.label if count in one.label else f'{one.label} ({count})'}: {one.why.rstrip('.')}."


def _law(found: Fit, points: int) -> list[str]:
    if found.contention.value > 1:  # no share of the work: one GPU is faster than any number
        name = "Amdahl's law" if found.coherency is None else "The USL"
        return [f"{name} does not describe these points: throughput falls as GPUs are added."]
    contention = f"contention {_share(found.contention)}"
    exact = points <= (2 if found.coherency is None else 3) and found.deviation < EXACT
    deviation = f"rms deviation {units.percent(found.deviation)} over {points} points"
    off = f"any {points} points have such a curve, so they do not test the law" if exact else deviation
    if found.coherency is None:
        return [f"Amdahl's law: {contention}; {off}. {_ceiling(found)}".rstrip()]
    lines = [f"USL: {contention}, coherency {_share(found.coherency, 4)} per pair of GPUs; {off}."]
    shown = found.coherency.low is not None and found.coherency.low > 0
    if found.most_gpus is not None and shown:
        lines.append(f"By the USL, throughput is highest near {units.count(found.most_gpus)} GPUs; more would slow it down.")
    elif not shown:
        lines.append("The USL's coherency is not shown to differ from 0: these points do not tell where throughput would peak.")
    return lines


def _ceiling(found: Fit) -> str:
    low = found.contention.low
    if low is None and found.contention.value > 0:
        return ""  # too few points to say anything
    if low is None or low <= 0:
        return "Contention is not shown to differ from 0."
    most = units.significant(1 / found.contention.value)
    return f"If it held beyond these points, no number of GPUs would exceed {most} x one."


def _share(value: Estimate, digits: int = 2) -> str:
    if value.low is None or value.high is None:
        why = "at its bound, no interval" if value.value == 0 else "no interval from so few points"
        return f"{units.percent(value.value, digits)} ({why})"
    low, high = (units.percent(end, digits).removesuffix(" %") for end in (value.low, value.high))
    return f"{units.percent(value.value, digits)} [{low}, {high}]"


def as_document(found: Sequence[FittedSeries]) -> list[dict[str, Any]]:
    """Return the series and laws as data, unrounded."""
    return [
        {
            "name": scaled.series.name,
            "kind": scaled.series.kind,
            "points": [_document(row) for row in scaled.series.rows],
            "left_out": [asdict(one) for one in scaled.series.left_out],
            "laws": [
                {
                    "law": law.law,
                    "single_gpu_tokens_per_second": _ends(law.single),
                    "contention": _ends(law.contention),
                    "coherency": None if law.coherency is None else _ends(law.coherency),
                    "rms_relative_deviation": law.deviation,
                    "most_gpus": law.most_gpus,
                }
                for law in scaled.fits
            ],
            "remarks": remarks(scaled, all_left_out=True),
        }
        for scaled in found
    ]


def _ends(value: Estimate) -> dict[str, float | None]:
    return {"value": value.value, "low": value.low, "high": value.high}


def _document(row: Row) -> dict[str, Any]:
    point = row.point
    return {
        "gpus": point.gpus,
        "nodes": point.nodes,
        "layout": point.layout or None,
        "tokens": point.tokens,
        "seconds": point.seconds,
        "tokens_per_second": _ends(point.tokens_per_second),
        "tokens_per_second_per_gpu": point.per_gpu,
        "multiplier": row.multiplier.value,
        "multiplier_low": row.multiplier.low,
        "multiplier_high": row.multiplier.high,
        "efficiency": row.efficiency.value,
        "efficiency_low": row.efficiency.low,
        "efficiency_high": row.efficiency.high,
    }
