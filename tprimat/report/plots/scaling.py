"""Draw img_throughput and img_multiplier: throughput and efficiency over numbers of GPUs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tprimat.analyze.metrics import scaled
from tprimat.analyze.scaling import Series, fit
from tprimat.core import units
from tprimat.records.schema import Estimate
from tprimat.report.catalogue import CPU_CAUTION, TOKENS, TOKENS_OF_ALL, per_rank
from tprimat.report.plots import MOST_SERIES, SMALL, Canvas, Look, Panel, Sheet, draw_sheet, looks, readable_log_ticks
from tprimat.report.scaling import cell, on_ranks, repetition
from tprimat.report.tables import plural, useful_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 4.6
"""Inches of a panel."""
Show = Callable[[float], str]
Lines = Callable[["Axes", Series, Look, bool], None]
"""Draws a series; the last says whether it is alone, and its values are written beside its points."""


def draw_throughput(found: Sequence[Series], path: Path) -> None:
    """Draw overall throughput against proportional growth, and throughput per GPU.

    Raises:
        UserError: the suffix names no picture format, or a folder that cannot be written.
    """

    def overall(axes: "Axes", series: Series, look: Look, alone: bool) -> None:
        gpus, rates = [point.gpus for point in series.points], [point.tokens_per_second for point in series.points]
        axes.plot(gpus, [rates[0].value / gpus[0] * count for count in gpus], color=look.colour, linestyle=":", linewidth=1)
        _line(axes, series, rates, look, TOKENS_OF_ALL.show if alone else None)

    def single(axes: "Axes", series: Series, look: Look, alone: bool) -> None:
        each = [scaled(point.tokens_per_second, 1 / point.gpus, 1) for point in series.points]
        _line(axes, series, each, look, TOKENS.show if alone else None)

    panels = [
        _panel(found, ("Throughput of all GPUs (dotted: proportional)", "tokens per second"), overall, log=True),
        _panel(found, ("Throughput of each GPU", "tokens per second and GPU"), single),
    ]
    draw_sheet(_sheet(found, panels), path)


def draw_multiplier(found: Sequence[Series], path: Path) -> None:
    """Draw the speed-up against proportional growth and the fitted law, and the efficiency.

    Raises:
        UserError: the suffix names no picture format, or a folder that cannot be written.
    """

    def times(axes: "Axes", series: Series, look: Look, alone: bool) -> None:
        _line(axes, series, [row.multiplier for row in series.rows], look, (lambda one: f"{one:.2f} x") if alone else None)
        first, last = series.points[0], series.points[-1]
        law, grid = fit(series), np.geomspace(first.gpus, last.gpus, 100)
        heights = [law.at(float(count)) / first.tokens_per_second.value for count in grid]
        axes.plot(grid, heights, color=look.colour, linestyle="--", linewidth=1.2, alpha=0.8)
        axes.plot([first.gpus, last.gpus], [1, last.gpus / first.gpus], color="#999999", linestyle=":")

    def share(axes: "Axes", series: Series, look: Look, alone: bool) -> None:
        shares = [scaled(row.efficiency, 100, 1) for row in series.rows]
        _line(axes, series, shares, look, (lambda one: units.percent(one / 100)) if alone else None)
        axes.axhline(100, color="#999999", linestyle=":")

    dotted = "Scaling multiplier (dotted: proportional, dashed: fitted)"
    panels = [
        _panel(found, (dotted, "times the throughput of the smallest"), times, log=True),
        _panel(found, ("Scaling efficiency", "% of the throughput per GPU of the smallest"), share),
    ]
    draw_sheet(_sheet(found, panels), path)


def _panel(found: Sequence[Series], words: tuple[str, str], lines: Lines, *, log: bool = False) -> Panel:
    """Return a panel by its title and vertical axis. Proportional growth is straight where both axes are logarithmic."""
    title, axis = words

    def draw(canvas: Canvas) -> None:
        from matplotlib.ticker import FuncFormatter, NullLocator

        axes, counts = canvas.axes(_ranks(found, title)), sorted({point.gpus for series in found for point in series.points})
        for series, look in _shown(found):
            lines(axes, series, look, len(found) == 1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(counts[0] / 1.25, counts[-1] * 1.6)
        axes.set_xlabel(_ranks(found, "GPUs (log scale)"), size=SMALL)
        axes.set_ylabel(_ranks(found, axis) + " (log scale)" * log)
        if log:
            axes.set_yscale("log", base=2)
            axes.margins(y=0.12)
            readable_log_ticks(axes)
        else:
            axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))

    return Panel(height=HEIGHT, draw=draw)


def _sheet(found: Sequence[Series], panels: Sequence[Panel]) -> Sheet:
    """Return a picture with the finding as its title, and what was measured below it."""
    more = f"; {len(found) - 1} more series" if len(found) > 1 else ""
    parts = [
        " and ".join(dict.fromkeys(f"{series.kind} scaling" for series in found if series.kind != "unknown")),
        ", ".join(dict.fromkeys(point.layout for series in found for point in series.points if point.layout)),
        "bars: 95 % intervals",
        f"{len(found) - MOST_SERIES} more series are not drawn" if len(found) > MOST_SERIES else "",
    ]
    missing, repeated = sum(len(series.left_out) for series in found), dict.fromkeys(map(repetition, found))
    left_out = f"{plural(missing, 'configuration')} of these results: no point here; the text says why."
    return Sheet(
        title=_finding(found[0]) + more,
        subtitle=" · ".join(filter(None, parts)),
        panels=panels,
        legend=[(series.name, look) for series, look in _shown(found)] if len(found) > 1 else (),
        notes=[
            *(repeated if len(repeated) == 1 else ()),
            *[CPU_CAUTION] * any(series.on_cpu for series in found),
            *[left_out] * (missing > 0),
        ],
    )


def _finding(series: Series) -> str:
    first, last = series.rows[0], series.rows[-1]
    if series.on_cpu:
        ranks = on_ranks(series, f"{first.point.gpus} to {last.point.gpus} GPUs")
        return f"{series.name}: {ranks}; a CPU does not show how training scales"
    speed = f"{last.point.gpus} GPUs make {last.multiplier.value:.2f} times the throughput of {first.point.gpus}"
    return f"{series.name}: {speed}, {cell(last.efficiency, units.percent)} of proportional"


def _ranks(found: Sequence[Series], words: str) -> str:
    """Return words on GPUs, on processes where every series ran on a CPU."""
    return per_rank(words, ("cpu" if series.on_cpu else "" for series in found))


def _shown(found: Sequence[Series]) -> list[tuple[Series, Look]]:
    return list(zip(found[:MOST_SERIES], looks(min(len(found), MOST_SERIES)), strict=True))


def _line(axes: "Axes", series: Series, values: Sequence[Estimate], look: Look, show: Show | None) -> None:
    """Draw values with their intervals; with `show` each is written below its point, where a rising line does not cross."""
    gpus = [point.gpus for point in series.points]
    axes.plot(gpus, [one.value for one in values], marker="o", color=look.colour, linestyle=look.line, label=series.name)
    for count, value in zip(gpus, values, strict=True):
        low, high = useful_ends(value)
        if low is not None and high is not None:
            axes.plot([count] * 2, [low, high], color=look.colour, linewidth=3, alpha=0.5)
        if show is not None:
            place = (count, value.value)
            axes.annotate(show(value.value), place, xytext=(7, -13), textcoords="offset points", ha="left", size=SMALL)
