"""Draw img_throughput and img_multiplier: throughput and efficiency over numbers of GPUs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tprimat.core import units
from tprimat.records.schema import Estimate
from tprimat.report.catalogue import CPU_CAUTION, TOKENS, TOKENS_OF_ALL, per_rank
from tprimat.report.plots.style import MOST_SERIES, SMALL, Look, figure, looks, readable_log_ticks, save, wrapped
from tprimat.report.scaling import MOST_LEFT_OUT, FittedSeries, assumption, cell, left_out_words, on_ranks, reasons, repetition
from tprimat.report.tables import plural, useful_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEFT, HEADLINE = 0.01, 12.5
"""Edge of the headline as a share of the width, and its size in points."""
TOP = 0.12
"""Inches above the headline and between the parts."""
MOST_LINES = 3
"""Series that the headline speaks of."""
LONGEST_LINE = 190
"""Letters under both panels."""


def draw_throughput(found: Sequence[FittedSeries], path: Path) -> None:
    """Draw overall throughput against proportional growth, and throughput per GPU.

    Raises:
        UserError: the suffix names no picture format, or a folder that cannot be written.
    """
    with figure(13, 5.4) as picture:
        overall, single = picture.subplots(1, 2)
        for scaled, look in _shown(found):
            points = scaled.series.points
            gpus = [point.gpus for point in points]
            total = [point.tokens_per_second.value for point in points]
            _line(overall, gpus, total, look)
            _intervals(overall, gpus, [point.tokens_per_second for point in points], look)
            overall.plot(gpus, [points[0].per_gpu * count for count in gpus], color=look.colour, linestyle=":", linewidth=1)
            _line(single, gpus, [point.per_gpu for point in points], look, scaled.series.name)
            _intervals(single, gpus, [point.tokens_per_second for point in points], look, [1 / count for count in gpus])
            if len(found) == 1:
                _values(overall, gpus, total, [TOKENS_OF_ALL.show(value) for value in total], -12)
                _values(single, gpus, [point.per_gpu for point in points], [TOKENS.show(point.per_gpu) for point in points])
        overall.set(title=_ranks(found, "Throughput of all GPUs (dotted: proportional)"), ylabel="tokens per second")
        single.set(title=_ranks(found, "Throughput of each GPU"), ylabel=_ranks(found, "tokens per second and GPU"))
        _axes(overall, found, logarithmic=True)
        _axes(single, found)
        single.legend(loc="lower left", fontsize=SMALL)
        _captions(picture, found)
        save(picture, path)


def draw_multiplier(found: Sequence[FittedSeries], path: Path) -> None:
    """Draw the speed-up against proportional growth and the fitted laws, and the efficiency.

    Raises:
        UserError: the suffix names no picture format, or a folder that cannot be written.
    """
    with figure(13, 5.4) as picture:
        times, share = picture.subplots(1, 2)
        for scaled, look in _shown(found):
            rows = scaled.series.rows
            gpus = [row.point.gpus for row in rows]
            multipliers, shares = [row.multiplier.value for row in rows], [row.efficiency.value for row in rows]
            _line(times, gpus, multipliers, look, scaled.series.name)
            _intervals(times, gpus, [row.multiplier for row in rows], look)
            _laws(times, scaled, look)
            _line(share, gpus, [100 * value for value in shares], look)
            _intervals(share, gpus, [row.efficiency for row in rows], look, [100] * len(rows))
            if len(found) == 1:
                _values(times, gpus, multipliers, [f"{value:.2f} x" for value in multipliers], -12)
                _values(share, gpus, [100 * value for value in shares], [units.percent(value) for value in shares], -14)
        first = min(scaled.series.points[0].gpus for scaled in found)
        last = max(scaled.series.points[-1].gpus for scaled in found)
        times.plot([first, last], [1, last / first], color="#999999", linestyle=":", label="proportional")
        times.set(title="Scaling multiplier", ylabel="times the throughput of the smallest")
        share.axhline(100, color="#999999", linestyle=":")
        share.set(title="Scaling efficiency", ylabel=_ranks(found, "% of the throughput per GPU of the smallest"))
        _axes(times, found, logarithmic=True)
        _axes(share, found)
        times.legend(loc="upper left", fontsize=SMALL)
        _captions(picture, found)
        save(picture, path)


def _captions(picture: "Figure", found: Sequence[FittedSeries]) -> None:
    """Write the finding above the panels, one line a series, and what was measured below them."""
    picture.set_layout_engine("constrained", h_pad=TOP)
    room = picture.get_figwidth() * (1 - 2 * LEFT)
    headline = [line for scaled in found[:MOST_LINES] for line in wrapped(_finding(scaled), room, HEADLINE, "bold")]
    picture.suptitle("\n".join(headline), x=LEFT, ha="left", fontsize=HEADLINE, fontweight="bold")
    bars = any(useful_ends(point.tokens_per_second)[0] is not None for scaled in found for point in scaled.series.points)
    layouts = dict.fromkeys(point.layout for scaled in found for point in scaled.series.points if point.layout)
    repeated = dict.fromkeys(filter(None, (repetition(scaled.series) for scaled in found)))
    rest = f"{len(found) - MOST_LINES} more series" if len(found) > MOST_LINES else ""
    parts = (
        " and ".join(dict.fromkeys(f"{one.series.kind} scaling" for one in found if one.series.kind != "unknown")),
        f"layouts {', '.join(layouts)}" if layouts else "",
        "bars: 95 % intervals" if bars else "",
        " ".join(repeated) if repeated else "one figure per point",
        rest,
    )
    caution = [CPU_CAUTION] if any(scaled.series.on_cpu for scaled in found) else []
    assumed = dict.fromkeys(filter(None, (assumption(scaled.series) for scaled in found)))
    lines = [" · ".join(filter(None, parts)), *assumed, *caution, *left_out_lines(found)]
    lines = [part for line in lines for part in wrapped(line, room, SMALL)]
    picture.supxlabel("\n".join(lines), x=LEFT, ha="left", fontsize=SMALL)


def left_out_lines(found: Sequence[FittedSeries]) -> list[str]:
    """Return a line for each configuration that is not a point, where they are many for each reason, and for undrawn series."""
    left_out = [one for scaled in found for one in scaled.series.left_out]
    few = len(left_out) <= MOST_LEFT_OUT
    lines = list(map(left_out_words, left_out)) if few else [f"Not points: {reason}." for reason in reasons(left_out)]
    more = [f"{plural(len(lines) - MOST_LEFT_OUT, 'more reason')} in the text."]
    undrawn = [f"{len(found) - MOST_SERIES} series of {len(found)} are not drawn."] if len(found) > MOST_SERIES else []
    return undrawn + [shortened(line) for line in lines[:MOST_LEFT_OUT]] + (more if len(lines) > MOST_LEFT_OUT else [])


def shortened(line: str) -> str:
    """Cut a line to what fits under the panels."""
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


def _finding(scaled: FittedSeries) -> str:
    first, last = scaled.series.rows[0], scaled.series.rows[-1]
    if scaled.series.on_cpu:
        ranks = on_ranks(scaled.series, f"{first.point.gpus} to {last.point.gpus} GPUs")
        return f"{scaled.series.name}: {ranks}; a CPU does not show how training scales"
    speed = f"{last.multiplier.value:.2f} times the throughput of {first.point.gpus}"
    return f"{scaled.series.name}: {last.point.gpus} GPUs make {speed}, {cell(last.efficiency, units.percent)} of proportional"


def _ranks(found: Sequence[FittedSeries], words: str) -> str:
    """Return words on GPUs, on processes where every series ran on a CPU."""
    return per_rank(words, ("cpu" if scaled.series.on_cpu else "" for scaled in found))


def _shown(found: Sequence[FittedSeries]) -> list[tuple[FittedSeries, Look]]:
    return list(zip(found[:MOST_SERIES], looks(min(len(found), MOST_SERIES)), strict=True))


def _line(axes: "Axes", gpus: Sequence[int], values: Sequence[float], look: Look, label: str | None = None) -> None:
    axes.plot(gpus, values, marker="o", color=look.colour, linestyle=look.line, label=label)


def _intervals(
    axes: "Axes", gpus: Sequence[int], estimates: Sequence[Estimate], look: Look, scales: Sequence[float] | None = None
) -> None:
    for count, found, scale in zip(gpus, estimates, scales or [1.0] * len(gpus), strict=True):
        low, high = useful_ends(found)
        if low is not None and high is not None:
            axes.plot([count] * 2, [low * scale, high * scale], color=look.colour, linewidth=3, alpha=0.5)


def _laws(axes: "Axes", scaled: FittedSeries, look: Look) -> None:
    points = scaled.series.points
    grid = np.geomspace(points[0].gpus, points[-1].gpus, 100)
    for law, style in zip(scaled.fits, ("--", "-."), strict=False):
        heights = [law.at(float(gpus)) / points[0].tokens_per_second.value for gpus in grid]
        label = "Amdahl's law, fitted" if law.law == "Amdahl" else "USL, fitted"
        axes.plot(grid, heights, color=look.colour, linestyle=style, linewidth=1.2, alpha=0.8, label=label)


def _values(axes: "Axes", gpus: Sequence[int], values: Sequence[float], words: Sequence[str], up: int = 6) -> None:
    """Write values next to points: above a falling line, below a rising one, so that the line does not cross them."""
    for place, value, word in zip(gpus, values, words, strict=True):
        axes.annotate(word, (place, value), xytext=(7, up), textcoords="offset points", ha="left", size=SMALL)


def _axes(axes: "Axes", found: Sequence[FittedSeries], *, logarithmic: bool = False) -> None:
    """Proportional growth is a straight line where both axes are logarithmic."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    counts = sorted({point.gpus for scaled in found for point in scaled.series.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(counts[0] / 1.25, counts[-1] * 1.6)
    axes.set_xlabel(_ranks(found, "GPUs (log scale)"))
    if logarithmic:
        axes.set_yscale("log", base=2)
        axes.margins(y=0.12)
        readable_log_ticks(axes)
        axes.set_ylabel(f"{axes.get_ylabel()} (log scale)")
    else:
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
