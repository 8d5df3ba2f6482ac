"""Draw the panels of peak_throughput_analysis: two of the peaks, two of every configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tprimat.analyze.metrics import scaled
from tprimat.analyze.peak import Entry, PeakAnalysis, best_of_models
from tprimat.analyze.traits import accelerator_name, dtype_that_ran
from tprimat.core import units
from tprimat.core.units import TERA
from tprimat.records.schema import Estimate
from tprimat.report.catalogue import (
    CPU_CAUTION,
    MATMUL_RATE,
    MATMUL_SHARE,
    TOKENS_OF_ALL,
    per_rank,
    tera,
)
from tprimat.report.names import Configuration, Workload, workloads
from tprimat.report.peak import MOST_MODELS, step_time
from tprimat.report.plots import INK, SMALL, Bar, Canvas, Look, Panel, Sheet, bars, rest_note, rows_height
from tprimat.report.plots.comparison import colours, not_counted_notes
from tprimat.report.tables import plural, useful_ends
from tprimat.report.words import picture_headline, sentence, subtitle

MOST_PEAKS, MOST_CONFIGURATIONS = 12, 24
"""More rows than this cannot be distinguished; the table has them all."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The rows that are drawn, and their looks."""

    analysis: PeakAnalysis
    works: Sequence[Workload]
    looks: dict[str, Look]
    """By the name of a configuration."""

    def configuration(self, entry: Entry) -> Configuration:
        """Return the names of an entry."""
        return next(one for work in self.works for one in work.configurations if one.group is entry.group)

    def look(self, entry: Entry) -> Look | None:
        """Return the look of an entry; None for one without a colour."""
        return self.looks.get(self.configuration(entry).name)

    def entries_of(self, work: Workload) -> list[Entry]:
        """Return the entries of a workload, fastest first."""
        inside = {id(one.group) for one in work.configurations}
        return [entry for entry in self.analysis.entries[:MOST_CONFIGURATIONS] if id(entry.group) in inside]


def peak_sheet(analysis: PeakAnalysis) -> Sheet:
    """Return the picture of an analysis with at least one peak, before it is drawn."""
    works = workloads(analysis.rankings)
    looks = colours(works)
    drawn = Drawn(analysis, works, looks)
    on_cpu = all(entry.run.machine.platform == "cpu" for entry in analysis.peaks)
    names = {one.name for work in works for one in work.configurations}
    notes = [rest_note(len(names) - len(looks))] if len(names) > len(looks) else []
    for rows, most, what in ((analysis.peaks, MOST_PEAKS, "peaks"), (analysis.entries, MOST_CONFIGURATIONS, "configurations")):
        notes += [f"{len(rows) - most} more {what} in the table."] if len(rows) > most else []
    notes += [CPU_CAUTION] if on_cpu else map(sentence, analysis.verdicts)
    compared = on_cpu or any(len(work.configurations) > 1 for work in works)
    return Sheet(
        headline=[*_peaks(analysis), *(picture_headline(works) if compared else ())],
        subtitle=subtitle(works),
        panels=[*_of_peaks(drawn), *_of_configurations(drawn)],
        notes=[*notes, *not_counted_notes(analysis.not_counted)],
    )


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


def _bar(label: str, estimate: Estimate | None, text: Callable[[float], str], look: Look | None) -> Bar:
    if estimate is None:
        return Bar(label=label, value=None, text=units.ABSENT, look=look)
    low, high = useful_ends(estimate)
    return Bar(label=label, value=estimate.value, low=low, high=high, text=text(estimate.value), look=look)


def _bar_panel(
    key: str, words: tuple[str, str], rows: Sequence[Bar], which: str, ceilings: Sequence[tuple[int, float]] = ()
) -> Panel:
    """Return a panel of bars, with black lines at the ceilings of some rows.

    Its words are title and axis. Panels whose rows are the same (`which`) label them once if they are side by side.
    """
    title, axis = words

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes(title)
        bars(axes, rows, canvas.inches, labelled=canvas.labelled)
        for place, ceiling in ceilings:
            axes.plot([ceiling, ceiling], [place - 0.42, place + 0.42], color=INK, linewidth=2.5)
        axes.set_xlim(0, max([axes.get_xlim()[1], *(1.02 * ceiling for _, ceiling in ceilings)]))
        axes.set_xlabel(axis, size=SMALL)

    present = any(row.value is not None for row in rows)
    return Panel(key=key, height=rows_height(rows), draw=draw, rows=which, present=present)


def _of_peaks(drawn: Drawn) -> list[Panel]:
    """Return throughput and compute of each peak, with the fastest product measured on its machine."""
    total, single, ceilings = [], [], []
    for place, entry in enumerate(drawn.analysis.peaks[:MOST_PEAKS]):
        one = drawn.configuration(entry)
        name = one.label.removeprefix(accelerator_name(entry.run)).strip() or one.label
        label, look = f"{entry.model}, {entry.platform}: {name}", drawn.look(entry)
        n = f" (n = {plural(len(entry.group.runs), 'run')}, {entry.steps} steps)"
        rate = scaled(entry.per_gpu, entry.gpus, entry.per_gpu.samples)
        total.append(_bar(label, rate, lambda value, n=n: TOKENS_OF_ALL.show(value) + n, look))  # type: ignore[misc]
        compute = entry.flops_per_gpu and scaled(entry.flops_per_gpu, 1 / TERA, entry.flops_per_gpu.samples)
        bar = _bar(label, compute, lambda value: tera(value * TERA), look)
        ceiling = MATMUL_RATE.value(entry.group)
        if ceiling is not None and compute is not None:
            ceilings.append((place, ceiling / TERA))
            bar = replace(bar, text=f"{bar.text}: {MATMUL_SHARE.text(entry.group)} of {ceiling / TERA:,.0f}")
        single.append(bar)
    axis = per_rank("tokens/s, all GPUs", {entry.run.machine.platform for entry in drawn.analysis.peaks})
    options = drawn.analysis.options
    counted = "6n of rounded sizes" if options.seed_conventions else f"{options.flops_convention} FLOP count"
    flops = counted + ("; black: fastest matmul probed" if ceilings else "")
    return [
        _bar_panel("throughput", ("Peak throughput of the whole machine", axis), total, "peaks"),
        _bar_panel("compute", ("Compute of each GPU", f"TFLOP/s, {flops}"), single, "peaks", ceilings),
    ]


def _of_configurations(drawn: Drawn) -> list[Panel]:
    """Return utilization and step time of all configurations, by workload."""
    shares: list[Bar] = []
    steps: list[Bar] = []
    for work in drawn.works:
        entries = drawn.entries_of(work)
        if work.title and entries:
            shares.append(Bar(label=work.title, value=None, heading=True))
            steps.append(shares[-1])
        for entry in entries:
            look, label, used = drawn.look(entry), drawn.configuration(entry).label, entry.utilization
            percent = used and scaled(used, 100, used.samples)
            shares.append(_bar(label, percent, lambda value: units.percent(value / 100), look))
            steps.append(_bar(label, entry.mean_step, lambda _, entry=entry: step_time(entry), look))  # type: ignore[misc]
    options, axis = drawn.analysis.options, "seconds (lines: 95 % interval; compare within a workload)"
    peak = "peak (NVIDIA: sparse, AMD: dense)" if options.seed_conventions else f"{options.peak} matrix peak"
    return [
        _bar_panel("utilization", ("Utilization, every configuration", f"% of the {peak}"), shares, "every"),
        _bar_panel("step-time", ("Mean step time", axis), steps, "every"),
    ]
