"""The six panels of a comparison: two rows of bars over groups, four curves over steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill, wrap
from typing import TYPE_CHECKING

from tprimat.analyze.groups import Group, group_estimate
from tprimat.records.metrics import Estimate
from tprimat.records.schema import StepRecord
from tprimat.report.plots.style import Bar, Look, bars, figure, looks, nothing, save
from tprimat.units import GIBIBYTE, TERA, percent, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

INTERVAL = "lines: 95 % interval, over runs, or over the steps of a single run"
WIDTH = 14
"""Inches, of the whole picture."""
LEGEND_HANDLE, LEGEND_CHARACTER = 0.8, 0.088
"""Inches that an entry of the legend takes: its line with the gaps around it, and an average character of its label."""
LABEL_CHARACTERS = 52
"""Of a line beside the bars: a longer label takes several."""
MOST_GROUPS = 32
"""More bars than this are not told apart; the table has them all."""
MOST_CURVES = 12
"""Runs of one group whose curves are drawn: more would cover one another."""
LOG_SPAN = 5
"""Largest over smallest from which a log axis surely shows two of its ticks at 1, 2, 5, 10, ...; the page has it too."""


def draw_comparison(groups: Sequence[Group], title: str, path: Path) -> None:
    """Draw all panels into one picture.

    Args:
        groups: at least one, in the order in which they are drawn; only the first MOST_GROUPS are.
        title: above all panels; says what differs where unlike runs are shown together.
        path: .png, .svg or .pdf.

    Raises:
        UserError: another suffix, or a folder that cannot be written.
    """
    shown = groups[:MOST_GROUPS]
    appearance = looks(len(shown))
    lines = max(len(wrap(group.label, LABEL_CHARACTERS)) for group in shown)
    bar_height = 1.2 + (0.17 + 0.17 * lines) * len(shown)
    curve_height = 6.8 + 0.24 * math.ceil(len(shown) / legend_columns(shown))
    with figure(WIDTH, bar_height + curve_height + 0.4) as made:
        upper, lower = made.subfigures(2, 1, squeeze=False, height_ratios=(bar_height + 0.4, curve_height)).flat
        speed, memory = upper.subplots(1, 2, sharey=True)
        _bars(speed, throughput_panel(shown), appearance)
        _bars(memory, memory_panel(shown), appearance)
        for axes, curve in zip(lower.subplots(2, 2).flat, CURVES, strict=True):
            _curves(axes, shown, appearance, curve)
        _legend(lower, shown, appearance)
        rest = f"; {len(groups) - len(shown)} more in the table" if len(groups) > len(shown) else ""
        upper.suptitle(title + rest, x=0.01, ha="left", size=13, weight="bold", wrap=True)
        save(made, path)


@dataclass(frozen=True, slots=True)
class Curve:
    """One panel over steps."""

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
    """One row of bars over groups, before it is drawn."""

    title: str
    axis: str
    rows: list[Bar]


def throughput_panel(groups: Sequence[Group]) -> BarPanel:
    """TFLOP/s per GPU; tokens/s where a CPU is among the runs, because FLOP/s of toy models on a CPU rank nothing."""
    on_cpu = any(group.run.machine.platform == "cpu" for group in groups)
    estimates = [
        group_estimate(
            group,
            lambda metrics: metrics.tokens_per_second_per_gpu if on_cpu else metrics.model_flops_per_second_per_gpu,
        )
        for group in groups
    ]
    scale = 1 if on_cpu else TERA
    notes = [_mfu(group) + _share_of_measured(group) for group in groups]
    rows = [_bar(group, estimate, scale, note) for group, estimate, note in zip(groups, estimates, notes, strict=True)]
    if on_cpu:
        title = "Throughput per rank in tokens/s\n(not TFLOP/s: a CPU has no matrix peak)"
        return BarPanel(title=title, axis=f"tokens per second and rank ({INTERVAL})", rows=rows)
    convention = next((item.metrics.flops_convention for item in groups[0].runs if item.metrics), "")
    return BarPanel(title=f"Model throughput per GPU ({convention} FLOP count)", axis=f"TFLOP/s per GPU ({INTERVAL})", rows=rows)


def _mfu(group: Group) -> str:
    mfu = group_estimate(group, lambda metrics: metrics.mfu)
    return f"{percent(mfu.value)} of peak, " if mfu else ""


def _share_of_measured(group: Group) -> str:
    shares = [item.metrics.share_of_measured_gemm for item in group.runs if item.metrics]
    known = [share for share in shares if share is not None]
    return f"{percent(sum(known) / len(known))} of measured matmul, " if known and len(known) == len(shares) else ""


def _bar(group: Group, estimate: Estimate | None, scale: float, note: str) -> Bar:
    if estimate is None:
        return Bar(label=group.label, value=None)
    return Bar(
        label=group.label,
        value=estimate.value / scale,
        low=None if estimate.low is None else estimate.low / scale,
        high=None if estimate.high is None else estimate.high / scale,
        text=f"{significant(estimate.value / scale)} ({note}{_count(group)})",
    )


def _count(group: Group) -> str:
    steps = sum(item.metrics.window.steps for item in group.runs if item.metrics)
    return f"{len(group.runs)} run{'s' * (len(group.runs) > 1)}, {steps} steps"


def memory_panel(groups: Sequence[Group]) -> BarPanel:
    """The largest peak of a group's runs, with the share of the GPU that it fills."""
    rows = []
    for group in groups:
        peaks = [item.metrics.peak_memory_bytes for item in group.runs if item.metrics and item.metrics.peak_memory_bytes]
        peak = max(peaks) / GIBIBYTE if peaks else None
        size = group.run.machine.memory_bytes
        share = f" ({percent(peak * GIBIBYTE / size, 0)} of the GPU)" if peak and size else ""
        low = min(peaks) / GIBIBYTE if len(peaks) > 1 else None
        rows.append(Bar(label=group.label, value=peak, low=low, high=peak, text="" if peak is None else f"{peak:.1f}{share}"))
    axis = "GiB allocated in steady steps (lines: least to most over runs)"
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
    """Warm-up is many times slower than the steady steps; a linear axis would flatten these. Less of it needs none."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    if axes.dataLim.ymax < LOG_SPAN * axes.dataLim.ymin:
        axes.set_ylabel("seconds")
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda y, _: ""))


def _legend(made: "SubFigure", groups: Sequence[Group], appearance: Sequence[Look]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=look.colour, linestyle=look.line, linewidth=2) for look in appearance]
    made.legend(handles, [group.label for group in groups], loc="outside lower left", ncols=legend_columns(groups))


def legend_columns(groups: Sequence[Group]) -> int:
    """As many as the longest label leaves room for; at most three."""
    longest = max(len(group.label) for group in groups)
    room = int(WIDTH / (LEGEND_HANDLE + LEGEND_CHARACTER * longest))
    return max(1, min(3, len(groups), room))
