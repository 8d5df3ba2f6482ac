"""Draw img_throughput and img_multiplier: throughput and efficiency over numbers of GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tprimat.analyze.metrics import scaled
from tprimat.analyze.scaling import Row, Series
from tprimat.core import units
from tprimat.records.schema import Estimate
from tprimat.report.catalogue import CPU_CAUTION, TOKENS, TOKENS_OF_ALL
from tprimat.report.plots import MOST_SERIES, SMALL, Canvas, Look, Panel, Sheet, looks, readable_log_ticks
from tprimat.report.scaling import cell, on_ranks, repetition
from tprimat.report.tables import plural, useful_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 4.6
"""Inches of a panel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCurve:
    """One panel: a figure of each point over its number of GPUs, with a dotted line where it grows in proportion."""

    title: str
    axis: str
    value: Callable[[Row], Estimate]
    show: Callable[[float], str]
    grows: bool = False
    """Whether it grows with the GPUs, and both axes are logarithmic, where proportional growth is straight."""


THROUGHPUT = (
    ScalingCurve(
        title="Throughput of all GPUs (dotted: proportional)",
        axis="tokens per second",
        value=lambda row: row.point.tokens_per_second,
        show=TOKENS_OF_ALL.show,
        grows=True,
    ),
    ScalingCurve(
        title="Throughput of each GPU",
        axis="tokens per second and GPU",
        value=lambda row: scaled(row.point.tokens_per_second, 1 / row.point.gpus, 1),
        show=TOKENS.show,
    ),
)
MULTIPLIER = (
    ScalingCurve(
        title="Scaling multiplier (dotted: proportional)",
        axis="times the throughput of the smallest",
        value=lambda row: row.multiplier,
        show=lambda times: f"{times:.2f} x",
        grows=True,
    ),
    ScalingCurve(
        title="Scaling efficiency",
        axis="% of the throughput per GPU of the smallest",
        value=lambda row: scaled(row.efficiency, 100, 1),
        show=lambda share: units.percent(share / 100),
    ),
)


def _panel(all_series: Sequence[Series], curve: ScalingCurve) -> Panel:
    def draw(canvas: Canvas) -> None:
        from matplotlib.ticker import FuncFormatter, NullLocator

        (axes,) = canvas.split(on_ranks(curve.title, *all_series), [""])
        counts = sorted({point.gpus for series in all_series for point in series.points})
        for series, look in _shown(all_series):
            _draw(axes, series, curve, look, written=len(all_series) == 1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(counts[0] / 1.25, counts[-1] * 1.6)
        axes.set_xlabel(on_ranks("GPUs (log scale)", *all_series), size=SMALL)
        axes.set_ylabel(on_ranks(curve.axis, *all_series) + " (log scale)" * curve.grows)
        if curve.grows:
            axes.set_yscale("log", base=2)
            axes.margins(y=0.12)
            readable_log_ticks(axes)
        else:
            axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))

    return Panel(height=HEIGHT, draw=draw)


def _draw(axes: "Axes", series: Series, curve: ScalingCurve, look: Look, *, written: bool) -> None:
    """Draw a series with its intervals; `written` below each point, where a rising line does not cross."""
    gpus, values = [point.gpus for point in series.points], [curve.value(row) for row in series.rows]
    axes.plot(gpus, [one.value for one in values], marker="o", color=look.color, linestyle=look.line, label=series.name)
    for count, one in zip(gpus, values, strict=True):
        low, high = useful_ends(one)
        if low is not None and high is not None:
            axes.plot([count] * 2, [low, high], color=look.color, linewidth=3, alpha=0.5)
        if written:
            place = (count, one.value)
            axes.annotate(curve.show(one.value), place, xytext=(7, -13), textcoords="offset points", ha="left", size=SMALL)
    last = values[0].value * (gpus[-1] / gpus[0] if curve.grows else 1)
    axes.plot([gpus[0], gpus[-1]], [values[0].value, last], color=look.color, linestyle=":", linewidth=1)


def scaling_sheet(all_series: Sequence[Series], curves: Sequence[ScalingCurve]) -> Sheet:
    """Return a picture before it is drawn: with the finding as its title, and what was measured below it."""
    more = f"; {len(all_series) - 1} more series" if len(all_series) > 1 else ""
    parts = [
        " and ".join(dict.fromkeys(f"{series.kind} scaling" for series in all_series)),
        ", ".join(dict.fromkeys(point.layout for series in all_series for point in series.points if point.layout)),
        "bars: 95 % intervals",
        f"{len(all_series) - MOST_SERIES} more series are not drawn" if len(all_series) > MOST_SERIES else "",
    ]
    missing, repeated = sum(len(series.left_out) for series in all_series), dict.fromkeys(map(repetition, all_series))
    left_out = f"{plural(missing, 'configuration')} of these results: no point here; the text says why."
    mixed = any(series.on_cpu for series in all_series) and not all_series[0].on_cpu  # a title says it of the first
    return Sheet(
        title=_finding(all_series[0]) + more,
        subtitle=" · ".join(filter(None, parts)),
        panels=[_panel(all_series, curve) for curve in curves],
        legend=[(series.name, look) for series, look in _shown(all_series)] if len(all_series) > 1 else (),
        notes=[*(repeated if len(repeated) == 1 else ()), *[CPU_CAUTION] * mixed, *[left_out] * (missing > 0)],
    )


def _finding(series: Series) -> str:
    first, last = series.rows[0], series.rows[-1]
    if series.on_cpu:
        ranks = on_ranks(f"{first.point.gpus} to {last.point.gpus} GPUs", series)
        return f"{series.name}: {ranks}; a CPU does not show how training scales"
    speed = f"{last.point.gpus} GPUs make {last.multiplier.value:.2f} times the throughput of {first.point.gpus}"
    return f"{series.name}: {speed}, {cell(last.efficiency, units.percent)} of proportional"


def _shown(all_series: Sequence[Series]) -> list[tuple[Series, Look]]:
    return list(zip(all_series[:MOST_SERIES], looks(min(len(all_series), MOST_SERIES)), strict=True))
