"""Draw img_throughput and img_multiplier: throughput and efficiency over numbers of GPUs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tprimat.analyze.scaling import Series, fit
from tprimat.core import units
from tprimat.records.schema import Estimate
from tprimat.report.catalogue import CPU_CAUTION, TOKENS, TOKENS_OF_ALL, per_rank
from tprimat.report.plots.style import MOST_SERIES, SMALL, Look, figure, looks, readable_log_ticks, save, wrapped
from tprimat.report.scaling import cell, on_ranks, repetition
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


def draw_throughput(found: Sequence[Series], path: Path) -> None:
    """Draw overall throughput against proportional growth, and throughput per GPU.

    Raises:
        UserError: the suffix names no picture format, or a folder that cannot be written.
    """
    with figure(13, 5.4) as picture:
        overall, single = picture.subplots(1, 2)
        for series, look in _shown(found):
            gpus, rates = [point.gpus for point in series.points], [point.tokens_per_second for point in series.points]
            each = [_times(rate, 1 / count) for count, rate in zip(gpus, rates, strict=True)]
            _line(overall, gpus, rates, look)
            overall.plot(gpus, [each[0].value * count for count in gpus], color=look.colour, linestyle=":", linewidth=1)
            _line(single, gpus, each, look, series.name)
            if len(found) == 1:
                _values(overall, series, rates, TOKENS_OF_ALL.show)
                _values(single, series, each, TOKENS.show, 6)
        overall.set(title=_ranks(found, "Throughput of all GPUs (dotted: proportional)"), ylabel="tokens per second")
        single.set(title=_ranks(found, "Throughput of each GPU"), ylabel=_ranks(found, "tokens per second and GPU"))
        _axes(overall, found, logarithmic=True)
        _axes(single, found)
        single.legend(loc="lower left", fontsize=SMALL)
        _captions(picture, found)
        save(picture, path)


def draw_multiplier(found: Sequence[Series], path: Path) -> None:
    """Draw the speed-up against proportional growth and the fitted law, and the efficiency.

    Raises:
        UserError: the suffix names no picture format, or a folder that cannot be written.
    """
    with figure(13, 5.4) as picture:
        times, share = picture.subplots(1, 2)
        for series, look in _shown(found):
            gpus, law = [point.gpus for point in series.points], fit(series)
            multipliers = [row.multiplier for row in series.rows]
            shares = [_times(row.efficiency, 100) for row in series.rows]
            _line(times, gpus, multipliers, look, series.name)
            _line(share, gpus, shares, look)
            if len(found) == 1:
                _values(times, series, multipliers, lambda one: f"{one:.2f} x")
                _values(share, series, shares, lambda one: units.percent(one / 100))
            grid = np.geomspace(gpus[0], gpus[-1], 100)
            heights = [law.at(float(count)) / series.points[0].tokens_per_second.value for count in grid]
            name = "Amdahl's law, fitted" if law.coherency is None else "USL, fitted"
            label = name if len(found) == 1 else None
            times.plot(grid, heights, color=look.colour, linestyle="--", linewidth=1.2, alpha=0.8, label=label)
        first, last = min(one.points[0].gpus for one in found), max(one.points[-1].gpus for one in found)
        times.plot([first, last], [1, last / first], color="#999999", linestyle=":", label="proportional")
        times.set(title="Scaling multiplier", ylabel="times the throughput of the smallest")
        share.axhline(100, color="#999999", linestyle=":")
        share.set(title="Scaling efficiency", ylabel=_ranks(found, "% of the throughput per GPU of the smallest"))
        _axes(times, found, logarithmic=True)
        _axes(share, found)
        times.legend(loc="upper left", fontsize=SMALL)
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


def _line(axes: "Axes", gpus: Sequence[int], values: Sequence[Estimate], look: Look, label: str | None = None) -> None:
    """Draw values with their intervals."""
    axes.plot(gpus, [one.value for one in values], marker="o", color=look.colour, linestyle=look.line, label=label)
    for count, value in zip(gpus, values, strict=True):
        low, high = useful_ends(value)
        if low is not None and high is not None:
            axes.plot([count] * 2, [low, high], color=look.colour, linewidth=3, alpha=0.5)


def _values(axes: "Axes", series: Series, values: Sequence[Estimate], show: Callable[[float], str], up: int = -13) -> None:
    """Write values next to points: below a rising line, above a falling one, so that the line does not cross them."""
    for point, value in zip(series.points, values, strict=True):
        place = (point.gpus, value.value)
        axes.annotate(show(value.value), place, xytext=(7, up), textcoords="offset points", ha="left", size=SMALL)


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
