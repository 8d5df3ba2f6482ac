"""Draw img_throughput and img_multiplier: throughput and efficiency over numbers of GPUs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tprimat.analyze.scaling import Series, fit
from tprimat.core import units
from tprimat.records.schema import Estimate
from tprimat.report.catalogue import CPU_CAUTION, TOKENS, TOKENS_OF_ALL, per_rank
from tprimat.report.plots import MOST_SERIES, SMALL, Look, figure, looks, readable_log_ticks, save, wrapped
from tprimat.report.scaling import cell, on_ranks, repetition
from tprimat.report.tables import plural, useful_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEFT, HEADLINE = 0.01, 12.5
"""Edge of the headline as a share of the width, and its size in points."""
TOP = 0.12
"""Inches above the headline and between the parts."""
Show = Callable[[float], str]
MOST_LINES = 3
"""Series that the headline speaks of."""


def draw_throughput(found: Sequence[Series], path: Path) -> None:
    """Draw overall throughput against proportional growth, and throughput per GPU.

    Raises:
        UserError: the suffix names no picture format, or a folder that cannot be written.
    """
    with figure(13, 5.4) as picture:
        (overall, single), alone = picture.subplots(1, 2), len(found) == 1
        for series, look in _shown(found):
            gpus, rates = [point.gpus for point in series.points], [point.tokens_per_second for point in series.points]
            each = [_times(rate, 1 / count) for count, rate in zip(gpus, rates, strict=True)]
            overall.plot(gpus, [each[0].value * count for count in gpus], color=look.colour, linestyle=":", linewidth=1)
            _line(overall, series, rates, look, TOKENS_OF_ALL.show if alone else None)
            _line(single, series, each, look, TOKENS.show if alone else None)
        overall.set(title=_ranks(found, "Throughput of all GPUs (dotted: proportional)"), ylabel="tokens per second")
        single.set(title=_ranks(found, "Throughput of each GPU"), ylabel=_ranks(found, "tokens per second and GPU"))
        _finish(picture, found, overall, single, path)


def draw_multiplier(found: Sequence[Series], path: Path) -> None:
    """Draw the speed-up against proportional growth and the fitted law, and the efficiency.

    Raises:
        UserError: the suffix names no picture format, or a folder that cannot be written.
    """
    with figure(13, 5.4) as picture:
        (times, share), alone = picture.subplots(1, 2), len(found) == 1
        for series, look in _shown(found):
            _line(times, series, [row.multiplier for row in series.rows], look, (lambda one: f"{one:.2f} x") if alone else None)
            shares = [_times(row.efficiency, 100) for row in series.rows]
            _line(share, series, shares, look, (lambda one: units.percent(one / 100)) if alone else None)
            law, grid = fit(series), np.geomspace(series.points[0].gpus, series.points[-1].gpus, 100)
            heights = [law.at(float(count)) / series.points[0].tokens_per_second.value for count in grid]
            times.plot(grid, heights, color=look.colour, linestyle="--", linewidth=1.2, alpha=0.8)
        first, last = min(one.points[0].gpus for one in found), max(one.points[-1].gpus for one in found)
        times.plot([first, last], [1, last / first], color="#999999", linestyle=":")
        times.set(
            title="Scaling multiplier (dotted: proportional, dashed: fitted)", ylabel="times the throughput of the smallest"
        )
        share.axhline(100, color="#999999", linestyle=":")
        share.set(title="Scaling efficiency", ylabel=_ranks(found, "% of the throughput per GPU of the smallest"))
        _finish(picture, found, times, share, path)


def _finish(picture: "Figure", found: Sequence[Series], left: "Axes", right: "Axes", path: Path) -> None:
    _axes(left, found, logarithmic=True)
    _axes(right, found)
    right.legend(loc="lower left", fontsize=SMALL)
    _captions(picture, found)
    save(picture, path)


def _times(value: Estimate, factor: float) -> Estimate:
    low, high = (None if end is None else end * factor for end in (value.low, value.high))
    return Estimate(value=value.value * factor, low=low, high=high, samples=value.samples)


def _captions(picture: "Figure", found: Sequence[Series]) -> None:
    """Write the finding above the panels, one line a series, and what was measured below them."""
    picture.set_layout_engine("constrained", h_pad=TOP)
    room = picture.get_figwidth() * (1 - 2 * LEFT)
    headline = [line for series in found[:MOST_LINES] for line in wrapped(_finding(series), room / 1.1, HEADLINE)]
    picture.suptitle("\n".join(headline), x=LEFT, ha="left", fontsize=HEADLINE, fontweight="bold")
    parts = [
        " and ".join(dict.fromkeys(f"{series.kind} scaling" for series in found if series.kind != "unknown")),
        ", ".join(dict.fromkeys(point.layout for series in found for point in series.points if point.layout)),
        "bars: 95 % intervals",
        f"{len(found) - MOST_SERIES} more series are not drawn" if len(found) > MOST_SERIES else "",
    ]
    caution = [CPU_CAUTION] if any(series.on_cpu for series in found) else []
    repeated = dict.fromkeys(map(repetition, found))
    missing = sum(len(series.left_out) for series in found)
    left_out = [f"{plural(missing, 'configuration')} of these results: no point here; the text says why."] if missing else []
    lines = [" · ".join(filter(None, parts)), *(repeated if len(repeated) == 1 else ()), *caution, *left_out]
    below = [part for line in lines for part in wrapped(line, room, SMALL, most=2)]
    picture.supxlabel("\n".join(below), x=LEFT, ha="left", fontsize=SMALL)


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


def _axes(axes: "Axes", found: Sequence[Series], *, logarithmic: bool = False) -> None:
    """Proportional growth is a straight line where both axes are logarithmic."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    counts = sorted({point.gpus for series in found for point in series.points})
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
