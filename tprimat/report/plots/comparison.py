"""Draw the six panels of a comparison: two of bars over groups, four of curves over steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill, wrap
from typing import TYPE_CHECKING

from tprimat.analyze.groups import Group
from tprimat.records.schema import StepRecord
from tprimat.report.catalogue import FLOPS, MATMUL_SHARE, MFU, PEAK_MEMORY, STEPS, TOKENS, Metric
from tprimat.report.plots.style import Bar, Look, bars, figure, looks, nothing, save
from tprimat.report.tables import plural
from tprimat.units import GIBIBYTE, percent, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

INTERVAL = "lines: 95 % interval, over runs, or over the steps of a single run"
WIDTH = 14
"""Of the whole picture, in inches."""
LEGEND_HANDLE, LEGEND_CHARACTER = 0.8, 0.088
"""Inches of a legend entry: its line with the gaps around it, and an average character of its label."""
LABEL_CHARACTERS = 52
"""Characters in a line next to the bars; a longer label takes several lines."""
MOST_GROUPS = 32
"""More bars than this cannot be distinguished; the table has them all."""
MOST_CURVES = 12
"""Runs of one group whose curves are drawn; more would cover each other."""
LOG_SPAN = 5
"""Ratio of largest to smallest from which a log axis shows two of its ticks at 1, 2, 5, 10, ... for sure; also in plots.js."""


def draw_comparison(groups: Sequence[Group], title: str, path: Path) -> None:
    """Draw all panels into one picture.

    Args:
        groups: at least one, in the order in which they are drawn; only the first MOST_GROUPS are.
        title: above all panels; names what differs where unlike runs are shown together.
        path: .png, .svg or .pdf.

    Raises:
        UserError: another suffix, or a folder that cannot be written.
    """
    shown = groups[:MOST_GROUPS]
    appearance = looks(len(shown))
    lines = max(len(wrap(group.label, LABEL_CHARACTERS)) for group in shown)
    bar_height = 1.2 + (0.17 + 0.17 * lines) * len(shown)
    curve_height = 6.8 + 0.24 * math.ceil(len(shown) / legend_columns(shown))
    with figure(WIDTH, bar_height + curve_height + 0.4) as picture:
        upper, lower = picture.subfigures(2, 1, squeeze=False, height_ratios=(bar_height + 0.4, curve_height)).flat
        speed, memory = upper.subplots(1, 2, sharey=True)
        _bars(speed, throughput_panel(shown), appearance)
        _bars(memory, memory_panel(shown), appearance)
        for axes, curve in zip(lower.subplots(2, 2).flat, CURVES, strict=True):
            _curves(axes, shown, appearance, curve)
        _legend(lower, shown, appearance)
        rest = f"; {len(groups) - len(shown)} more in the table" if len(groups) > len(shown) else ""
        upper.suptitle(title + rest, x=0.01, ha="left", size=13, weight="bold", wrap=True)
        save(picture, path)


@dataclass(frozen=True, slots=True)
class Curve:
    """One panel of curves over steps."""

    title: str
    unit: str
    value: Callable[[StepRecord], float | None]
    logarithmic: bool = False


def _gibibytes(step: StepRecord) -> float | None:
    return None if step.peak_allocated_bytes is None else step.peak_allocated_bytes / GIBIBYTE


CURVES = (
    Curve("Training loss", "nats per token", lambda step: step.loss),
    Curve("Learning rate", "learning rate", lambda step: step.learning_rate),
    Curve("Peak memory in each step, worst rank", "GiB allocated", _gibibytes),
    Curve("Step time (dot: end of warm-up)", "seconds, log scale", lambda step: step.step_seconds, logarithmic=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPanel:
    """One panel of bars over groups, before it is drawn."""

    title: str
    axis: str
    rows: list[Bar]


def throughput_panel(groups: Sequence[Group]) -> BarPanel:
    """Return TFLOP/s per GPU, or tokens/s where a run is on a CPU, because FLOP/s of toy models on a CPU rank nothing."""
    on_cpu = any(group.run.machine.platform == "cpu" for group in groups)
    metric = TOKENS if on_cpu else FLOPS
    rows = [_bar(group, metric) for group in groups]
    axis = f"{metric.unit} ({INTERVAL})"
    if on_cpu:
        title = "Throughput per rank in tokens/s\n(not TFLOP/s: a CPU has no matrix peak)"
        return BarPanel(title=title, axis=axis, rows=rows)
    convention = next((item.metrics.flops_convention for item in groups[0].runs if item.metrics), "")
    return BarPanel(title=f"Model throughput per GPU ({convention} FLOP count)", axis=axis, rows=rows)


def _bar(group: Group, metric: Metric) -> Bar:
    estimate = metric.of_group(group)
    if estimate is None:
        return Bar(label=group.label, value=None)
    value, low, high = (None if end is None else end / metric.scale for end in (estimate.value, estimate.low, estimate.high))
    shares = ((MFU, "of peak"), (MATMUL_SHARE, "of measured matmul"))
    notes = [f"{share.text(group)} {whole}" for share, whole in shares if share.of_group(group) is not None]
    notes.append(f"{plural(len(group.runs), 'run')}, {STEPS.text(group)} steps")
    text = f"{significant(estimate.value / metric.scale)} ({', '.join(notes)})"
    return Bar(label=group.label, value=value, low=low, high=high, text=text)


def memory_panel(groups: Sequence[Group]) -> BarPanel:
    """Return the largest peak over the runs of each group, with the share of the GPU's memory."""
    rows = []
    for group in groups:
        peak, size = PEAK_MEMORY.value(group), group.run.machine.memory_bytes
        if peak is None:
            rows.append(Bar(label=group.label, value=None))
            continue
        peaks = [item.metrics.peak_memory_bytes for item in group.runs if item.metrics and item.metrics.peak_memory_bytes]
        low = min(peaks) / PEAK_MEMORY.scale if len(peaks) > 1 else None
        height = peak / PEAK_MEMORY.scale
        share = f" ({percent(peak / size, 0)} of the GPU)" if size else ""
        rows.append(Bar(label=group.label, value=height, low=low, high=height, text=f"{height:.1f}{share}"))
    axis = f"{PEAK_MEMORY.unit} (lines: least to most over runs)"
    return BarPanel(title="Peak memory, worst rank", axis=axis, rows=rows)


def _bars(axes: "Axes", panel: BarPanel, appearance: Sequence[Look]) -> None:
    bars(axes, [replace(row, label=fill(row.label, LABEL_CHARACTERS)) for row in panel.rows], appearance)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.axis, size=8.5)


def _curves(axes: "Axes", groups: Sequence[Group], appearance: Sequence[Look], curve: Curve) -> None:
    drawn = False
    for group, look in zip(groups, appearance, strict=True):
        for item in group.runs[:MOST_CURVES]:
            points = [(step.step, height) for step in item.result.steps if (height := curve.value(step)) is not None]
            axes.plot(*zip(*points, strict=True), color=look.colour, linestyle=look.line, linewidth=1.4, alpha=0.85)
            drawn = drawn or bool(points)
            if curve.logarithmic and item.metrics is not None:
                first = [point for point in points if point[0] == item.metrics.window.first_step]
                axes.plot(*zip(*first, strict=True), marker="o", color=look.colour, markersize=4)
    axes.set(title=curve.title, ylabel=curve.unit, xlabel="optimizer step")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
    axes.locator_params(axis="x", integer=True)
    if not drawn:
        nothing(axes, "not recorded in these runs")
    elif curve.logarithmic:
        _log_seconds(axes)


def _log_seconds(axes: "Axes") -> None:
    """Make the axis logarithmic where warm-up is so much slower that a linear axis would flatten the steady steps."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    if axes.dataLim.ymax < LOG_SPAN * axes.dataLim.ymin:
        axes.set_ylabel("seconds")
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda y, _: ""))


def _legend(part: "SubFigure", groups: Sequence[Group], appearance: Sequence[Look]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=look.colour, linestyle=look.line, linewidth=2) for look in appearance]
    part.legend(handles, [group.label for group in groups], loc="outside lower left", ncols=legend_columns(groups))


def legend_columns(groups: Sequence[Group]) -> int:
    """Return how many columns the longest label leaves room for, at most three."""
    longest = max(len(group.label) for group in groups)
    room = int(WIDTH / (LEGEND_HANDLE + LEGEND_CHARACTER * longest))
    return max(1, min(3, len(groups), room))
