"""Draw the nine panels of peak_throughput_analysis: six of the peaks, three of every configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from textwrap import fill
from typing import TYPE_CHECKING, Literal

from tprimat import units
from tprimat.analyze.compare import Verdict
from tprimat.analyze.peak import Entry, configuration_names
from tprimat.records.schema import Estimate
from tprimat.report.catalogue import MATMUL_RATE, MATMUL_SHARE, PEAK_MEMORY, tera
from tprimat.report.peak import PeakAnalysis, step_time
from tprimat.report.plots.style import Bar, Look, bars, figure, looks, nothing, save
from tprimat.units import TERA

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

MOST_PEAKS = 12
MOST_CONFIGURATIONS = 24
"""More rows than this cannot be distinguished; the table has them all."""
ON_CPU = "not counted on a CPU"
SMALL = 8.5
BOX_FROM = 4
"""Fewer configurations are drawn as points only: quartiles of three values mean nothing."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The rows that are drawn, and their looks."""

    analysis: PeakAnalysis
    peaks: Sequence[Entry]
    entries: Sequence[Entry]
    colours: dict[tuple[str, str], Look]
    """By platform and model."""

    @property
    def rank(self) -> str:
        """Return the unit of a machine: GPU, or process where everything ran on CPUs."""
        return "process" if all(entry.run.machine.platform == "cpu" for entry in self.peaks) else "GPU"

    def looks_of(self, rows: Sequence[Entry]) -> list[Look]:
        """Return the look of each row; platforms and models beyond the palette share the last one."""
        last = next(reversed(self.colours.values()))
        return [self.colours.get((entry.platform, entry.model), last) for entry in rows]


def draw_peaks(analysis: PeakAnalysis, path: Path) -> None:
    """Draw all panels into one picture.

    Args:
        analysis: with at least one peak.
        path: .png, .svg or .pdf.

    Raises:
        UserError: another suffix, or a folder that cannot be written.
    """
    shown = analysis.peaks[:MOST_PEAKS]
    colours = {(entry.platform, entry.model): look for entry, look in zip(shown, looks(len(shown)), strict=True)}
    drawn = Drawn(analysis, shown, analysis.entries[:MOST_CONFIGURATIONS], colours)
    short, tall = 1.4 + 0.42 * len(shown), 1.5 + 0.3 * max(len(drawn.entries), 6)
    with figure(17, 2 * short + tall + 0.9) as picture:
        parts = picture.subfigures(3, 1, squeeze=False, height_ratios=(short + 0.5, short, tall)).flat
        _speed_row(parts[0], drawn)
        _limit_row(parts[1], drawn)
        _configuration_row(parts[2], drawn)
        parts[0].suptitle(_title(analysis), x=0.005, ha="left", size=13, weight="bold")
        save(picture, path)


def _title(analysis: PeakAnalysis) -> str:
    best = analysis.peaks[0]
    share = f", {units.percent(best.utilization.value)} of its matrix peak" if best.utilization else ""
    title = f"Peak throughput: {best.model} on {best.platform}, {units.count(best.tokens_per_second)} tokens/s{share}"
    hidden = [
        f"{len(rows) - most} {what} more in the table"
        for rows, most, what in (
            (analysis.peaks, MOST_PEAKS, "peaks"),
            (analysis.entries, MOST_CONFIGURATIONS, "configurations"),
        )
        if len(rows) > most
    ]
    return "; ".join([title, *hidden])


def _speed_row(part: "SubFigure", drawn: Drawn) -> None:
    total, single, compute = part.subplots(1, 3, sharey=True)
    _bars(total, drawn, lambda entry: _scaled(entry.per_gpu, entry.gpus), units.count, counted=True)
    total.set(title="1  Peak throughput of the whole machine", xlabel="tokens/s, all GPUs")
    _bars(single, drawn, lambda entry: entry.per_gpu, units.count)
    single.set(title=f"2  The same for each {drawn.rank}", xlabel=f"tokens per second and {drawn.rank} (lines: 95 % interval)")
    _compute(compute, drawn, lambda entry: _scaled(entry.flops_per_gpu, entry.gpus / TERA))
    compute.set(title="3  Peak compute of the whole machine", xlabel=f"TFLOP/s, all GPUs ({drawn.analysis.flops_words})")
    for axes in (total, single, compute):
        _thousands(axes)


def _limit_row(part: "SubFigure", drawn: Drawn) -> None:
    single, spread, against = part.subplots(1, 3)
    _compute(single, drawn, lambda entry: _scaled(entry.flops_per_gpu, 1 / TERA))
    _ceilings(single, drawn)
    _spread(spread, drawn)
    spread.sharey(single)
    spread.tick_params(labelleft=False)
    _against(against, drawn.analysis.verdicts)


def _configuration_row(part: "SubFigure", drawn: Drawn) -> None:
    share, step, memory = part.subplots(1, 3, width_ratios=(1, 1, 1.1))
    appearance = drawn.looks_of(drawn.entries)
    rows = [
        Bar(label=label, value=None, text=entry.utilization_absent_because or "")
        if entry.utilization is None
        else Bar(label=label, value=entry.utilization.value * 100, text=units.percent(entry.utilization.value))
        for entry, label in zip(drawn.entries, _labels(drawn.entries), strict=True)
    ]
    if any(row.value for row in rows):
        bars(share, [_brief(row) for row in rows], appearance)
    else:
        _empty(share, rows)
    share.tick_params(axis="y", labelsize=SMALL)
    share.set(title="7  Utilization, every configuration", xlabel=f"% of the {drawn.analysis.peak_words}")
    bars(step, [Bar(label="", value=entry.mean_step_seconds, text=step_time(entry)) for entry in drawn.entries], appearance)
    step.tick_params(labelleft=False)
    step.set(title="8  Mean step time", xlabel="seconds (steps of unequal work are not comparable)")
    _memory(memory, drawn)


def _labels(entries: Sequence[Entry]) -> list[str]:
    """Label each configuration, on two lines where it is long."""
    return [
        fill(f"{entry.model}, {entry.platform}, {name}", 62, max_lines=2)
        for entry, name in zip(entries, configuration_names(entries), strict=True)
    ]


def _brief(row: Bar) -> Bar:
    return row if row.value is not None else Bar(label=row.label, value=None, text="–")


def _empty(axes: "Axes", rows: Sequence[Bar]) -> None:
    """Draw a panel without any value: the reason once, and the labels for the neighbouring panel."""
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.text(
        0.5,
        0.5,
        "\n".join(dict.fromkeys(row.text for row in rows)),
        ha="center",
        va="center",
        transform=axes.transAxes,
        color="#555555",
        style="italic",
        size=SMALL,
    )


def _thousands(axes: "Axes") -> None:
    """Format ticks with thousands separators (12,000), and only a few of them; none on an empty axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if not len(axes.get_xticks()):
        return
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))


def _scaled(estimate: Estimate | None, factor: float) -> Estimate | None:
    if estimate is None:
        return None
    low, high = (None if end is None else end * factor for end in (estimate.low, estimate.high))
    return Estimate(value=estimate.value * factor, low=low, high=high, samples=estimate.samples)


def _bars(
    axes: "Axes",
    drawn: Drawn,
    pick: Callable[[Entry], Estimate | None],
    show: Callable[[float], str],
    *,
    counted: bool = False,
) -> None:
    """Draw a bar per peak, with the number of runs and steps in the first panel of a row."""
    rows = []
    for entry in drawn.peaks:
        found = pick(entry)
        label = f"{entry.model}, {entry.platform}"
        if found is None:
            reason = ON_CPU if entry.run.machine.platform == "cpu" else "shape or sequence not recorded"
            rows.append(Bar(label=label, value=None, text=reason))
            continue
        runs = len(entry.group.runs)
        count = f" (n = {runs} run{'s' * (runs > 1)}, {entry.steps} steps)" if counted else ""
        rows.append(Bar(label=label, value=found.value, low=found.low, high=found.high, text=show(found.value) + count))
    bars(axes, rows, drawn.looks_of(drawn.peaks))


def _compute(axes: "Axes", drawn: Drawn, pick: Callable[[Entry], Estimate | None]) -> None:
    _bars(axes, drawn, pick, lambda value: tera(value * TERA))


def _ceilings(axes: "Axes", drawn: Drawn) -> None:
    """Mark the fastest product measured on the same machine, which training cannot exceed."""
    probed = [
        (place, ceiling / TERA, MATMUL_SHARE.text(entry.group))
        for place, entry in enumerate(drawn.peaks)
        if entry.flops_per_gpu and (ceiling := MATMUL_RATE.value(entry.group)) and MATMUL_SHARE.value(entry.group)
    ]
    for place, ceiling, share in probed:
        axes.plot([ceiling, ceiling], [place - 0.42, place + 0.42], color="black", linewidth=2.5)
        axes.text(ceiling, place, f" {ceiling:,.0f}: {share}", ha="left", va="center", size=SMALL)
    if probed:
        axes.set_xlim(0, max(axes.get_xlim()[1], *(ceiling * 1.3 for _, ceiling, _ in probed)))
    line = "\n(black: fastest matmul probed, and the share of it)" if probed else "\n(no matmul probed: --probe gemm)"
    counted = any(entry.flops_per_gpu for entry in drawn.peaks)
    axes.set(title=f"4  Compute of each {drawn.rank}", xlabel=f"TFLOP/s per {drawn.rank}{line if counted else ''}")
    _thousands(axes)


def _spread(axes: "Axes", drawn: Drawn) -> None:
    """Draw how much the choice of configuration matters on one machine."""
    top = max(entry.per_gpu.value for entry in drawn.peaks)
    for place, (peak, look) in enumerate(zip(drawn.peaks, drawn.looks_of(drawn.peaks), strict=True)):
        values = [
            entry.per_gpu.value
            for entry in drawn.analysis.entries
            if (entry.platform, entry.model) == (peak.platform, peak.model)
        ]
        if len(values) >= BOX_FROM:
            low, middle, high = quantiles(values, n=4, method="inclusive")
            axes.barh(place, high - low, left=low, height=0.5, color="none", edgecolor="#555555")
            axes.plot([middle, middle], [place - 0.25, place + 0.25], color="#555555", linewidth=2)
        axes.plot(values, [place] * len(values), "o", color=look.colour, markeredgecolor="white", markersize=8)
        ratio = f", best {max(values) / min(values):.1f} x the slowest" if len(values) > 1 else ""
        side: Literal["left", "center"] = "left" if max(values) < top / 3 else "center"
        axes.text(max(values), place - 0.3, f"n = {len(values)}{ratio}", va="bottom", ha=side, size=SMALL)
    axes.set_xlim(0, top * 1.35)
    axes.set(title="5  Effect of the configuration", xlabel=f"tokens/s and {drawn.rank}\n(a dot a configuration, box: quartiles)")
    _thousands(axes)
    axes.grid(visible=False, axis="y")


def _against(axes: "Axes", verdicts: Sequence[Verdict]) -> None:
    """Draw machines against each other, one model at a time."""
    axes.set_title("6  Machine against machine")
    if not verdicts:
        nothing(axes, "no model ran on two machines")
        return
    shown = verdicts[:MOST_PEAKS]
    rows = []
    for verdict in shown:
        label = fill(f"{verdict.candidate} over {verdict.baseline}", 34)
        if verdict.ratio is None:
            differing = ", ".join(entry.what for entry in verdict.differences)
            rows.append(Bar(label=label, value=None, text=fill(f"not compared, different: {differing}", 44)))
            continue
        ratio = verdict.ratio
        text = f"{ratio.value:.2f}" + ("" if verdict.differences == () else " (unlike work)")
        rows.append(Bar(label=label, value=ratio.value, low=ratio.low, high=ratio.high, text=text))
    bars(axes, rows, [Look("#999999", "-", "")] * len(rows))
    axes.tick_params(axis="y", labelsize=SMALL)
    axes.axvline(1, color="#333333", linewidth=1, linestyle=":")
    axes.set_xlabel("ratio of throughput per GPU (lines: 95 % interval)")


def _memory(axes: "Axes", drawn: Drawn) -> None:
    axes.set_title("9  Memory against speed")
    peaks = [(entry, PEAK_MEMORY.value(entry.group)) for entry in drawn.analysis.entries]
    points = [(entry, peak / PEAK_MEMORY.scale) for entry, peak in peaks if peak is not None]
    if not points:
        nothing(axes, "peak memory not recorded")
        return
    for (entry, memory), look in zip(points, drawn.looks_of([entry for entry, _ in points]), strict=True):
        axes.plot(memory, entry.per_gpu.value, "o", color=look.colour, markeredgecolor="white", markersize=9)
    axes.set(xlabel="GiB allocated at the peak, worst rank", ylabel=f"tokens per second and {drawn.rank}")
    axes.set_xlim(0, 1.1 * max(memory for _, memory in points))
    axes.set_ylim(0, 1.1 * max(entry.per_gpu.value for entry, _ in points))
