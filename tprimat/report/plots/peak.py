"""Draw the up to nine panels of peak_throughput_analysis: six of the peaks, three of every configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import quantiles
from typing import TYPE_CHECKING

from tprimat.analyze.compare import rankings
from tprimat.analyze.metrics import scaled
from tprimat.analyze.peak import Entry, best_of_models
from tprimat.analyze.traits import accelerator_name, dtype_that_ran
from tprimat.core import units
from tprimat.core.units import TERA
from tprimat.records.schema import Estimate
from tprimat.report.captions import headline, subtitle
from tprimat.report.catalogue import (
    CPU_CAUTION,
    MATMUL_RATE,
    MATMUL_SHARE,
    TOKENS,
    TOKENS_OF_ALL,
    memory_metric,
    memory_unit,
    tera,
)
from tprimat.report.names import Configuration, Workload, workloads
from tprimat.report.peak import MOST_MODELS, PeakAnalysis, step_time
from tprimat.report.plots.comparison import MOST_WORKLOADS, colours, not_counted_notes
from tprimat.report.plots.sheet import Canvas, Panel, Sheet, rest_note
from tprimat.report.plots.style import (
    DOTS_PER_INCH,
    LABEL,
    POINTS_PER_INCH,
    SMALL,
    Bar,
    Look,
    bars,
    place_labels,
    rows_height,
    thousands,
    wrapped,
)
from tprimat.report.tables import plural, useful_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_PEAKS = 12
MOST_CONFIGURATIONS = 24
"""More rows than this cannot be distinguished; the table has them all."""
BOX_FROM = 4
"""Fewer configurations are drawn as points only: quartiles of three values mean nothing."""
BOX_POINTS = 14
"""Height of a box; labels are farther from the middle."""
MOST_POINTS = 4
"""Points of memory against speed that are labelled in a third of a row."""
LABEL_INCHES, WIDE_LABEL_INCHES = 2.6, 3.9
"""Of the peaks, and of every configuration."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The rows that are drawn, and their looks."""

    analysis: PeakAnalysis
    works: Sequence[Workload]
    looks: dict[str, Look]
    """By the name of a configuration."""

    @property
    def peaks(self) -> Sequence[Entry]:
        """Return the fastest configuration of each machine and model."""
        return self.analysis.peaks[:MOST_PEAKS]

    @property
    def rank(self) -> str:
        """Return the unit of a machine: GPU, or process where everything ran on CPUs."""
        return "process" if all(entry.run.machine.platform == "cpu" for entry in self.peaks) else "GPU"

    def configuration(self, entry: Entry) -> Configuration:
        """Return the names of an entry."""
        return next(one for work in self.works for one in work.configurations if one.group is entry.group)

    def name(self, entry: Entry, *, layout: bool = False) -> str:
        """Return what to call an entry next to its machine, with the layout behind its strategy where asked."""
        one = self.configuration(entry)
        name = one.label if layout else one.name
        return name.removeprefix(accelerator_name(entry.run)).strip() or name

    def look(self, entry: Entry) -> Look | None:
        """Return the look of an entry; None for one without a colour."""
        return self.looks.get(self.configuration(entry).name)

    def entries_of(self, work: Workload) -> list[Entry]:
        """Return the entries of a workload, fastest first."""
        inside = {id(one.group) for one in work.configurations}
        return [entry for entry in self.analysis.entries[:MOST_CONFIGURATIONS] if id(entry.group) in inside]


FOR_GPUS = ("compute", "compute-per-gpu", "utilization", "machines")
ON_CPUS = "for GPUs only"
LACKS = {
    "throughput": "no throughput is known",
    "per-gpu": "no throughput is known",
    "compute": "FLOP/s are not known",
    "compute-per-gpu": "FLOP/s are not known",
    "configurations": "needs two configurations of the same work",
    "machines": "needs one model on two machines, with the same work",
    "utilization": "FLOP/s or the peak of the GPU are not known",
    "step-time": "no step time is known",
    "memory": "no peak memory is recorded",
}
"""Why a panel has nothing to show."""


def peak_sheet(analysis: PeakAnalysis) -> Sheet:
    """Return the picture of an analysis with at least one peak, before it is drawn."""
    works = workloads(rankings([entry.group for entry in analysis.entries]))
    looks = colours(works)
    drawn = Drawn(analysis, works, looks)
    machines = _machine_bars(drawn)
    compared = any(len(work.configurations) > 1 for work in works)
    names = {one.name for work in works for one in work.configurations}
    notes = [rest_note(len(names) - len(looks))] if len(names) > len(looks) else []
    for rows, most, what in ((analysis.peaks, MOST_PEAKS, "peaks"), (analysis.entries, MOST_CONFIGURATIONS, "configurations")):
        notes += [f"{len(rows) - most} more {what} in the table."] if len(rows) > most else []
    if drawn.rank == "process":
        notes.append(f"{CPU_CAUTION} Panels of FLOP/s, utilization and machines are for GPUs.")
    notes += [*_refusals(machines), *not_counted_notes(analysis.not_counted)]
    return Sheet(
        headline=[*_peaks(analysis), *(headline(works) if compared or drawn.rank == "process" else ())],
        subtitle=subtitle(works),
        panels=[
            *_speed(drawn),
            _per_gpu_compute(drawn),
            _effect(drawn),
            _machines(machines),
            *_every_configuration(drawn),
            _memory(drawn),
        ],
        legend=list(looks.items()) if len(looks) > 1 else (),
        notes=notes,
        curves=False,
        width=17,
        columns=3,
        numbered=True,
    )


def panel_words(sheet: Sheet, analysis: PeakAnalysis) -> str:
    """Say how many panels have data, and what each of the others lacks."""
    lacking: dict[str, list[str]] = {}
    on_cpus = all(entry.run.machine.platform == "cpu" for entry in analysis.peaks)
    for panel in sheet.panels:
        if not panel.present:
            lacking.setdefault(ON_CPUS if on_cpus and panel.key in FOR_GPUS else LACKS[panel.key], []).append(panel.key)
    drawn = sum(panel.present for panel in sheet.panels)
    why = "; ".join(f"{', '.join(keys)}: {what}" for what, keys in lacking.items())
    return f"{drawn} of {len(sheet.panels)} panels" + (f"; not drawn: {why}" if why else "")


def _peaks(analysis: PeakAnalysis) -> list[str]:
    """Return the best configuration of each model, in one line each."""
    best = best_of_models(analysis.peaks)
    more = f"; {plural(len(best) - MOST_MODELS, 'more model')}" if len(best) > MOST_MODELS else ""
    lines = [_peak(entry) for entry in best[:MOST_MODELS]]
    return [*lines[:-1], lines[-1] + more]


def _peak(best: Entry) -> str:
    dtype = f" in {dtype_that_ran(best.run)}" if best.run.ran.matmul_dtype else ""
    share = f", {units.percent(best.utilization.value)} of its matrix peak" if best.utilization else ""
    rate = f"{TOKENS_OF_ALL.show(best.tokens_per_second)} tokens/s{share}, {plural(len(best.group.runs), 'run')}"
    return f"Peak throughput: {best.model} on {best.platform}{dtype}, {rate}"


def _scaled(estimate: Estimate | None, factor: float) -> Estimate | None:
    return None if estimate is None else scaled(estimate, factor, estimate.samples)


def _peak_bars(
    drawn: Drawn, pick: Callable[[Entry], Estimate | None], show: Callable[[float], str], *, counted: bool = False
) -> list[Bar]:
    """Return a bar per peak, with the number of runs and steps where asked."""
    rows = []
    for entry in drawn.peaks:
        found, look = pick(entry), drawn.look(entry)
        label = f"{entry.model}, {entry.platform}: {drawn.name(entry, layout=True)}"
        if found is None:
            rows.append(Bar(label=label, value=None, text="shape or sequence not recorded", look=look))
            continue
        runs = len(entry.group.runs)
        count = f" (n = {runs} run{'s' * (runs > 1)}, {entry.steps} steps)" if counted else ""
        low, high = useful_ends(found)
        rows.append(Bar(label=label, value=found.value, low=low, high=high, text=show(found.value) + count, look=look))
    return rows


def _bar_panel(
    key: str,
    words: tuple[str, str],
    rows: Sequence[Bar],
    which: str,
    more: Callable[["Axes", Canvas], None] | None = None,
) -> Panel:
    """Return a panel of bars, with the words of its title and of its axis; `more` draws what else it shows.

    Panels whose rows are the same (`which`) label them once if they are side by side.
    """
    title, axis = words
    inches = WIDE_LABEL_INCHES if which == "every" else LABEL_INCHES

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes(title)
        bars(axes, rows, canvas.paper, inches=inches if canvas.labelled else None)
        axes.set_xlabel(axis, size=SMALL)
        if more is not None:
            more(axes, canvas)
        canvas.fit(axes)

    present = any(row.value is not None for row in rows)
    return Panel(key=key, height=rows_height(rows, inches), draw=draw, rows=which, present=present)


def _teraflops(value: float) -> str:
    return tera(value * TERA)


def _speed(drawn: Drawn) -> list[Panel]:
    analysis, rank = drawn.analysis, drawn.rank
    total = _peak_bars(drawn, lambda entry: _scaled(entry.per_gpu, entry.gpus), TOKENS_OF_ALL.show, counted=True)
    single = _peak_bars(drawn, lambda entry: entry.per_gpu, TOKENS.show)
    compute = _peak_bars(drawn, lambda entry: _scaled(entry.flops_per_gpu, entry.gpus / TERA), _teraflops)
    whole = f"tokens/s, all {rank}{'es' if rank == 'process' else 's'}"
    each = f"tokens per second and {rank} (lines: 95 % interval)"
    flops = f"TFLOP/s, all GPUs ({analysis.flops_words})"
    return [
        _bar_panel("throughput", ("Peak throughput of the whole machine", whole), total, "peaks"),
        _bar_panel("per-gpu", (f"The same for each {rank}", each), single, "peaks"),
        _bar_panel("compute", ("Peak compute of the whole machine", flops), compute, "peaks"),
    ]


def _per_gpu_compute(drawn: Drawn) -> Panel:
    """Return the panel with the fastest product measured on the same machine, which training cannot exceed."""
    rows = _peak_bars(drawn, lambda entry: _scaled(entry.flops_per_gpu, 1 / TERA), _teraflops)
    probed = []
    for place, entry in enumerate(drawn.peaks):
        ceiling, share = MATMUL_RATE.value(entry.group), MATMUL_SHARE.value(entry.group)
        if entry.flops_per_gpu and ceiling and share:
            text = f" {rows[place].text}: {MATMUL_SHARE.text(entry.group)} of {ceiling / TERA:,.0f}"
            probed.append((place, ceiling / TERA, text))
            rows[place] = replace(rows[place], text="")  # the line would cross it

    def ceilings(axes: "Axes", canvas: Canvas) -> None:
        for place, ceiling, text in probed:
            axes.plot([ceiling, ceiling], [place - 0.42, place + 0.42], color=canvas.paper.ink, linewidth=2.5)
            canvas.at_end(axes, max(ceiling, rows[place].high or 0), place, text)
        if probed:
            axes.set_xlim(0, max(axes.get_xlim()[1], *(ceiling * 1.02 for _, ceiling, _ in probed)))

    line = "(black: fastest matmul probed, and the share of it)" if probed else "(no matmul probed: probe gemm)"
    words = f"Compute of each {drawn.rank}", f"TFLOP/s per {drawn.rank}\n{line}"
    return _bar_panel("compute-per-gpu", words, rows, "peaks", ceilings)


# The effect of the configuration: a row for each workload and machine, so that no dot stands next to unlike work.


def _effect(drawn: Drawn) -> Panel:
    rows: list[tuple[str, list[Entry]]] = []
    for work in drawn.works:
        machines: dict[str, list[Entry]] = {}
        for entry in drawn.entries_of(work):
            machines.setdefault(accelerator_name(entry.run), []).append(entry)
        for machine, entries in machines.items():
            label = ", ".join(filter(None, (work.title, machine if len(machines) > 1 else ""))) or entries[0].model
            if len(entries) > 1:
                ratio = entries[0].per_gpu.value / entries[-1].per_gpu.value
                label = "\n".join(wrapped(label, LABEL_INCHES, LABEL))
                rows.append((f"{label}\nbest {ratio:.2f} x the slowest of {len(entries)}", entries))

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes("Effect of the configuration")
        points = []
        for place, (_, entries) in enumerate(rows):
            points += _spread(axes, drawn, place, entries, canvas)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows])
        axes.tick_params(axis="y", length=0, labelsize=LABEL)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        values = [entry.per_gpu.value for _, entries in rows for entry in entries]
        room = 0.15 * (max(values) - min(values)) + 0.03 * max(values)
        left = max(0, min(values) - room)
        axes.set_xlim(left, max(values) + room)
        boxes = ["box: quartiles"] if any(len(entries) >= BOX_FROM for _, entries in rows) else []
        start = ["the axis does not start at 0"] if left else []
        notes = "; ".join(["one dot per configuration of the same work", *boxes]) + "".join(f";\n{note}" for note in start)
        axes.set_xlabel(f"tokens per second and {drawn.rank}\n({notes})", size=SMALL)
        thousands(axes)
        axes.grid(visible=False, axis="y")
        canvas.after_layout.append(lambda: place_labels(axes, points, vertical=True))

    lines = sum(label.count("\n") + 1 for label, _ in rows)
    return Panel(key="configurations", height=1.4 + 0.4 * len(rows) + 0.15 * lines, draw=draw, present=bool(rows))


def _spread(axes: "Axes", drawn: Drawn, place: int, entries: Sequence[Entry], canvas: Canvas) -> list[tuple[float, float, str]]:
    """Draw one row of dots; return what to write at the fastest and the slowest one."""
    values = [entry.per_gpu.value for entry in entries]
    if len(values) >= BOX_FROM:
        low, middle, high = quantiles(values, n=4, method="inclusive")
        canvas.after_layout.append(partial(_box, axes, place, (low, middle, high), canvas.paper.soft))
    for entry in reversed(entries):
        look = drawn.look(entry)
        colour = look.colour if look else canvas.paper.rest
        axes.plot(entry.per_gpu.value, place, "o", color=colour, markeredgecolor=canvas.paper.page, markersize=8)
    return [(entry.per_gpu.value, place, drawn.name(entry)) for entry in (entries[0], entries[-1])]


def _box(axes: "Axes", place: int, quarters: tuple[float, float, float], colour: str) -> None:
    """Draw a box as high as a dot, once the layout is known, so that the labels above and below stand clear of it."""
    low, middle, high = quarters
    rows = abs(axes.get_ylim()[1] - axes.get_ylim()[0])
    half = BOX_POINTS / 2 / POINTS_PER_INCH * DOTS_PER_INCH / axes.get_window_extent().height * rows
    axes.barh(place, high - low, left=low, height=2 * half, color="none", edgecolor=colour)
    axes.plot([middle, middle], [place - half, place + half], color=colour, linewidth=2, zorder=1.5)


def _machine_bars(drawn: Drawn) -> list[Bar]:
    """Return a bar for each machine against the fastest one of its model; none for CPUs."""
    peak_of = {entry.group.label: entry for entry in drawn.analysis.entries}
    rows = []
    for verdict in drawn.analysis.verdicts[:MOST_PEAKS] if drawn.rank == "GPU" else ():
        one, other = peak_of[verdict.candidate], peak_of[verdict.baseline]
        label = f"{one.model}: {one.platform} over {other.platform}"
        if verdict.ratio is None:
            differing = ", ".join(entry.name for entry in verdict.differences)
            rows.append(Bar(label=label, value=None, text=f"not compared, different: {differing}"))
            continue
        ratio = verdict.ratio
        text = f"{ratio.value:.2f} x" + ("" if verdict.differences == () else " (unlike work)")
        low, high = useful_ends(ratio)
        rows.append(Bar(label=label, value=ratio.value, low=low, high=high, text=text))
    return rows


def _machines(rows: Sequence[Bar]) -> Panel:
    """Return the panel of machines against each other, one model at a time."""

    def parity(axes: "Axes", canvas: Canvas) -> None:
        axes.axvline(1, color=canvas.paper.ink, linewidth=1, linestyle=":")
        axes.set_xlim(0, max(1.1, axes.get_xlim()[1]))

    axis = "ratio of throughput per GPU (lines: 95 % interval)"
    return _bar_panel("machines", ("Machine against machine", axis), rows, "machines", parity)


def _refusals(rows: Sequence[Bar]) -> list[str]:
    """Return notes on the machines that are not compared, where that leaves no bar and so no panel."""
    return [] if any(row.value is not None for row in rows) else [f"{row.label}: {row.text}." for row in rows]


def _every_configuration(drawn: Drawn) -> list[Panel]:
    """Return utilization and step time of all configurations, by workload."""
    share: list[Bar] = []
    step: list[Bar] = []
    for work in drawn.works:
        entries = drawn.entries_of(work)
        if work.title and entries:
            share.append(Bar(label=work.title, value=None, heading=True))
            step.append(share[-1])
        for entry in entries:
            look, label = drawn.look(entry), drawn.configuration(entry).label
            used = entry.utilization
            percent = None if used is None else used.value * 100
            share.append(Bar(label=label, value=percent, text="–" if used is None else units.percent(used.value), look=look))
            low, high = useful_ends(entry.mean_step)
            step.append(Bar(label=label, value=entry.mean_step.value, low=low, high=high, text=step_time(entry), look=look))
    return [
        _bar_panel("utilization", ("Utilization, every configuration", f"% of the {drawn.analysis.peak_words}"), share, "every"),
        _bar_panel("step-time", ("Mean step time", "seconds (lines: 95 % interval; compare within a workload)"), step, "every"),
    ]


def _memory(drawn: Drawn) -> Panel:
    """Return memory against speed, one part for each workload, with the names of its points."""
    groups = [entry.group for entry in drawn.analysis.entries]
    metric = memory_metric(groups)
    found = [
        (work, points)
        for work in drawn.works
        if (points := [(entry, peak) for entry in drawn.entries_of(work) if (peak := metric.value(entry.group)) is not None])
    ]
    found = [one for one in found if len(one[1]) > 1][:MOST_WORKLOADS] or found[:MOST_WORKLOADS]

    def draw(canvas: Canvas) -> None:
        parts = canvas.split("Memory against speed", [work.title for work, _ in found])
        for number, (axes, (_, points)) in enumerate(zip(parts, found, strict=True)):
            labels: list[tuple[float, float, str]] = []
            for entry, peak in reversed(points):
                look, memory = drawn.look(entry), peak / metric.scale
                colour = look.colour if look else canvas.paper.rest
                axes.plot(memory, entry.per_gpu.value, "o", color=colour, markeredgecolor=canvas.paper.page, markersize=9)
                labels.insert(0, (memory, entry.per_gpu.value, drawn.configuration(entry).name))
            _around(axes, [memory for memory, _, _ in labels], [speed for _, speed, _ in labels])
            axes.set_xlabel(f"{memory_unit(groups)} at the peak, worst rank", size=SMALL)
            axes.set_ylabel(f"tokens per second and {drawn.rank}" if number == 0 else "", size=SMALL)
            canvas.after_layout.append(partial(place_labels, axes, labels))

    crowded = len(found) > 1 or sum(len(points) for _, points in found) > MOST_POINTS
    return Panel(key="memory", height=3.8, draw=draw, present=bool(found), whole_row=crowded)


def _around(axes: "Axes", across: Sequence[float], up: Sequence[float]) -> None:
    """Let the axes reach a little farther than their points, so that labels have room."""
    if len(across) == 1:
        axes.set_xlim(0, 1.5 * across[0])
        axes.set_ylim(0, 1.5 * up[0])
    else:
        room = 0.3 * (max(across) - min(across)) + 0.1 * max(across)
        axes.set_xlim(max(0, min(across) - room), max(across) + room)
        room = 0.15 * (max(up) - min(up)) + 0.03 * max(up)
        axes.set_ylim(max(0, min(up) - room), max(up) + room)
    thousands(axes)
    thousands(axes, vertical=True)
