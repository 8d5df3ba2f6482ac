"""Draw the six panels of a comparison: two of bars over groups, four of curves over steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from tprimat.analyze.groups import Group, Measured
from tprimat.analyze.traits import few
from tprimat.core.units import GIBIBYTE, percent, significant
from tprimat.records.schema import StepRecord
from tprimat.report import catalogue
from tprimat.report.comparison import Comparison
from tprimat.report.names import RankedWorkload, ranked_workloads
from tprimat.report.plots import LINE_STYLES, MOST_SERIES, Bar, BarPanel, Canvas, Look, Panel, Sheet, bar_of, looks, thousands
from tprimat.report.tables import plural
from tprimat.report.words import differing_traits, judged_in, not_counted_briefly, open_losses, picture_title, run_name, subtitle

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INTERVAL = "lines: 95 % interval"
MOST_GROUPS = 32
"""More bars than this cannot be distinguished; the table has them all."""
MOST_CURVES = 12
"""Runs of one group whose curves are drawn; more would cover each other."""
MOST_WORKLOADS = 3
"""Workloads whose curves are side by side in a panel."""
MOST_NAMED = 3
"""Runs that do not count and that a note names."""
SMALLEST_PLAIN = 0.01
"""Numbers below are written as multiples of a power of ten, which the axis names."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One panel of curves over steps."""

    title: str
    unit: str
    value: Callable[[StepRecord], float | None]
    least_span: float = 0.1
    """The axis spans at least this share of its largest value, so that noise does not look like a trend."""
    steady: bool = False
    """Whether start-up is left out, because it would flatten the steady steps."""


def curves_of(groups: Sequence[Group]) -> list[Curve]:
    """Return the panels of curves; memory is what the bars of the same picture show."""
    metric = catalogue.memory_metric(groups)

    def gibibytes(step: StepRecord) -> float | None:
        size = step.peak_allocated_bytes if metric is catalogue.PEAK_MEMORY else step.peak_reserved_bytes
        return None if size is None else size / GIBIBYTE

    return [
        Curve("Training loss", "nats per token", lambda step: step.loss),
        Curve("Learning rate", "learning rate", lambda step: step.learning_rate),
        Curve("Peak memory in each step, worst rank", catalogue.memory_unit(groups), gibibytes, least_span=0.2),
        Curve("Step time", "seconds", lambda step: step.step_seconds, steady=True),
    ]


def comparison_sheet(comparison: Comparison) -> Sheet:
    """Return the picture of a comparison of at least one group, before it is drawn."""
    works = ranked_workloads(comparison.rankings)
    shown = colors(works)
    unlike = sorted({entry.name for verdict in comparison.verdicts if verdict.ratio for entry in verdict.differences})
    warning = f"NOT LIKE FOR LIKE, they differ in {', '.join(unlike)}. " if unlike else ""
    notes = rest_note(works, shown)
    if len(works) > MOST_WORKLOADS:
        notes.append(f"Curves: of the {MOST_WORKLOADS} workloads with the most configurations.")
    platforms = [work.ranking.best.run.machine.platform for work in works]
    if platforms[0] != "cpu" and "cpu" in platforms:  # a title says it only of the first
        notes.append(catalogue.CPU_CAUTION)
    hidden = len(comparison.groups) - MOST_GROUPS
    judged = judged_in(works)
    notes += [f"{plural(hidden, 'more configuration')} in the table."] if hidden > 0 else []
    return Sheet(
        title=warning + picture_title(works),
        subtitle=subtitle(works),
        panels=[
            _bar_panel(works, shown, throughput_panel),
            _bar_panel(works, shown, memory_panel),
            *(_curve_panel(works, shown, curve) for curve in curves_of(comparison.groups)),
        ],
        legend=list(shown.items()) if len(shown) > 1 else (),
        notes=[*notes, *differing_traits(judged), *open_losses(judged), *not_counted_notes(comparison.not_counted)],
    )


def colors(works: Sequence[RankedWorkload]) -> dict[str, Look]:
    """Return the look of the configurations that get one: the fastest of each workload first."""
    ranks = zip_longest(*(work.configurations for work in works))
    names = dict.fromkeys(one.name for rank in ranks for one in rank if one is not None)
    return dict(zip(list(names)[:MOST_SERIES], looks(MOST_SERIES), strict=False))


def rest_note(works: Sequence[RankedWorkload], shown: Mapping[str, Look]) -> list[str]:
    """Return the note about configurations without a color of their own, where there are some."""
    rest = len({one.name for work in works for one in work.configurations}) - len(shown)
    note = f"Gray: {plural(rest, 'more configuration')}; the {MOST_SERIES} in color are the fastest of each workload."
    return [note] if rest else []


def not_counted_notes(not_counted: Sequence[Measured]) -> list[str]:
    """Name the runs that a picture leaves out, of many the first ones and how many more."""
    named = [f"{run_name(item)} ({not_counted_briefly(item)})" for item in not_counted]
    return [f"Not counted: {few(named, MOST_NAMED)}."] if named else []


def throughput_panel(groups: Sequence[Group]) -> BarPanel:
    """Return TFLOP/s per GPU, or tokens/s where a run is on a CPU, because FLOP/s of toy models on a CPU rank nothing."""
    on_cpu = any(group.run.machine.platform == "cpu" for group in groups)
    metric = catalogue.TOKENS if on_cpu else catalogue.FLOPS
    runs = len({len(group.runs) for group in groups}) > 1
    rows = [_bar(group, metric, counted=runs) for group in groups]
    platforms = {group.run.machine.platform for group in groups}
    axis = catalogue.per_rank(metric.unit, platforms) + f" ({INTERVAL})" * any(row.low is not None for row in rows)
    convention = next((item.metrics.flops_convention for item in groups[0].runs if item.metrics), "")
    title = "Throughput per GPU in tokens/s" if on_cpu else f"Model throughput per GPU ({convention} FLOP count)"
    return BarPanel(catalogue.per_rank(title, platforms), axis, rows)


def _bar(group: Group, metric: catalogue.Metric, *, counted: bool) -> Bar:
    estimate = metric.of_group(group)
    if estimate is None:
        return Bar(label=group.label, value=None)
    shares = ((catalogue.MFU, "of peak"), (catalogue.MATMUL_SHARE, "of measured matmul"))
    notes = [f"{share.text(group)} {whole}" for share, whole in shares if share.of_group(group) is not None]
    notes += [plural(len(group.runs), "run")] if counted else []
    text = significant(estimate.value / metric.scale) + (f" ({', '.join(notes)})" if notes else "")
    return bar_of(group.label, estimate, text, scale=metric.scale)


def memory_panel(groups: Sequence[Group]) -> BarPanel:
    """Return the largest peak over the runs of each group, with the share of the GPU's memory."""
    metric = catalogue.memory_metric(groups)
    rows = []
    for group in groups:
        peak, size = metric.value(group), group.run.machine.memory_bytes
        if peak is None:
            rows.append(Bar(label=group.label, value=None))
            continue
        peaks = [one.value for item in group.runs if item.metrics and (one := metric.of_run(item.metrics))]
        low = min(peaks) / metric.scale if len(peaks) > 1 else None
        height = peak / metric.scale
        share = f" ({percent(peak / size, 0)} of the GPU)" if size else ""
        rows.append(Bar(label=group.label, value=height, low=low, high=height, text=f"{significant(height)}{share}"))
    several = " (lines: least to most over runs)" if any(row.low is not None for row in rows) else ""
    return BarPanel("Peak memory, worst rank", f"{catalogue.memory_unit(groups)} in steady steps{several}", rows)


def _bar_panel(works: Sequence[RankedWorkload], shown: dict[str, Look], make: Callable[[Sequence[Group]], BarPanel]) -> Panel:
    every = [(work, one) for work in works for one in work.configurations][:MOST_GROUPS]
    panel = make([one.group for _, one in every])
    rows: list[Bar] = []
    for (work, one), bar in zip(every, panel.rows, strict=True):
        if work.title and one is work.configurations[0]:
            rows.append(Bar(label=work.title, value=None, heading=True))
        rows.append(replace(bar, label=one.label, look=shown.get(one.name)))
    return replace(panel, rows=rows).panel("configurations")


# Curves.


Line = tuple[Look, list[tuple[int, float]]]
"""The curve of one run: step and height of each point."""


def _lines(work: RankedWorkload, shown: dict[str, Look], curve: Curve) -> list[Line]:
    """Return the curves of the runs whose configuration has a look; steady ones from the end of warm-up on."""
    lines: list[Line] = []
    for one in (one for one in work.configurations if one.name in shown):
        for item in one.group.runs[:MOST_CURVES]:
            first = item.metrics.window.first_step if curve.steady and item.metrics else 0
            steps = [step for step in item.result.steps if step.step >= first]
            points = [(step.step, height) for step in steps if (height := curve.value(step)) is not None]
            lines += [(shown[one.name], points)] if points else []
    return lines


def _curve_panel(works: Sequence[RankedWorkload], shown: dict[str, Look], curve: Curve) -> Panel:
    filled = [(work, lines) for work in works if (lines := _lines(work, shown, curve))]
    drawn = filled[:MOST_WORKLOADS]

    def draw(canvas: Canvas) -> None:
        parts = canvas.split(curve.title, [work.title for work, _ in drawn])
        for number, (axes, (_, lines)) in enumerate(zip(parts, drawn, strict=True)):
            _draw_curves(axes, lines, curve)
            canvas.notes(axes, "optimizer step", ["start-up left out"] if curve.steady else [], len(parts))
            if number and axes.get_ylabel() == parts[0].get_ylabel():
                axes.set_ylabel("")

    return Panel(height=3.2, draw=draw, present=bool(filled))


def _draw_curves(axes: "Axes", lines: Sequence[Line], curve: Curve) -> None:
    for look, points in sorted(lines, key=lambda line: LINE_STYLES.index(line[0].line)):  # broken lines over whole ones
        mark = "o" if len(points) == 1 else ""  # a line through one point is invisible
        axes.plot(*zip(*points, strict=True), color=look.color, linestyle=look.line, marker=mark, linewidth=1.5, alpha=0.9)
    axes.margins(x=0.02)
    steps = {step for _, points in lines for step, _ in points}
    if len(steps) == 1:
        axes.set_xlim(min(steps) - 1, max(steps) + 1)
    axes.locator_params(axis="x", integer=True, nbins=5)
    heights = [height for _, points in lines for _, height in points]
    low, high = min(heights), max(heights)
    middle, half = (low + high) / 2, 0.58 * max(high - low, curve.least_span * abs(high), 1e-12)
    bottom = max(0.0, middle - half) if low >= 0 else middle - half
    axes.set_ylim(bottom, max(middle + half, bottom + 2 * half))
    power = math.floor(math.log10(high)) if 0 < high < SMALLEST_PLAIN else 0
    thousands(axes, vertical=True, scale=10.0**power)
    axes.set_ylabel(curve.unit + (f" (1e{power})" if power else ""))
