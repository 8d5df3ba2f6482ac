"""Draw the panels of peak_throughput_analysis: two of the peaks, two of every configuration."""

from collections.abc import Sequence

from tprimat.analyze.peak import PeakAnalysis, PeakEntry, best_of_models
from tprimat.analyze.traits import accelerator_name, dtype_that_ran
from tprimat.core import units
from tprimat.core.units import TERA
from tprimat.report.catalogue import MATMUL_RATE, MATMUL_SHARE, TOKENS_OF_ALL, per_rank, tera
from tprimat.report.names import RankedWorkload, ranked_workloads
from tprimat.report.plots import Bar, BarPanel, Look, Panel, Sheet, bar_of
from tprimat.report.plots.comparison import colors, not_counted_notes, rest_note
from tprimat.report.tables import plural
from tprimat.report.words import differing_traits, judged_in, picture_title, sentence, subtitle

MOST_PEAKS, MOST_CONFIGURATIONS = 12, 24
"""More rows than this cannot be distinguished; the table has them all."""


def peak_sheet(analysis: PeakAnalysis) -> Sheet:
    """Return the picture of an analysis with at least one peak, before it is drawn."""
    works = ranked_workloads(analysis.rankings)
    looks = colors(works)
    on_cpu = all(entry.run.machine.platform == "cpu" for entry in analysis.peaks)
    notes = rest_note(works, looks)
    for rows, most, what in ((analysis.peaks, MOST_PEAKS, "peaks"), (analysis.entries, MOST_CONFIGURATIONS, "configurations")):
        notes += [f"{len(rows) - most} more {what} in the table."] if len(rows) > most else []
    refused = [sentence(one) for one in analysis.verdicts if one.outcome == "refused"]
    notes += [] if on_cpu else [*differing_traits(judged_in(works)), *refused]
    return Sheet(
        title=picture_title(works) if on_cpu else _title(analysis),
        subtitle=subtitle(works),
        panels=[*_of_peaks(analysis, works, looks), *_of_configurations(analysis, works, looks)],
        notes=[*notes, *not_counted_notes(analysis.not_counted)],
    )


def _title(analysis: PeakAnalysis) -> str:
    best, *others = best_of_models(analysis.peaks)
    dtype = f" in {dtype_that_ran(best.run)}" if best.run.ran.matmul_dtype else ""
    share = f", {units.percent(best.utilization.value)} of its matrix peak" if best.utilization else ""
    rate = f"{TOKENS_OF_ALL.show(best.tokens_per_second)} tokens/s{share}, {plural(len(best.group.runs), 'run')}"
    more = f"; {plural(len(others), 'more model')}" if others else ""
    return f"Peak throughput: {best.model} on {best.platform}{dtype}, {rate}{more}"


def _of_peaks(analysis: PeakAnalysis, works: Sequence[RankedWorkload], looks: dict[str, Look]) -> list[Panel]:
    """Return throughput and compute of each peak, with the fastest product measured on its machine."""
    named = {id(one.group): one for work in works for one in work.configurations}
    several = len({dtype_that_ran(entry.run) for entry in analysis.peaks}) > 1
    total, single = [], []
    for entry in analysis.peaks[:MOST_PEAKS]:
        one, flops, ceiling = named[id(entry.group)], entry.flops_per_gpu, MATMUL_RATE.value(entry.group)
        name = one.label.removeprefix(accelerator_name(entry.run)).strip() or one.label
        dtype = f", {dtype_that_ran(entry.run) or 'dtype unknown'}" if several else ""
        label, look = f"{entry.model}, {entry.platform}{dtype}: {name}", looks.get(one.name)
        n = f"n = {plural(len(entry.group.runs), 'run')}, {entry.steps} steps"
        text = f"{TOKENS_OF_ALL.show(entry.tokens_per_second)} ({n})"
        total.append(bar_of(label, entry.per_gpu, text, look, scale=1 / entry.gpus))
        text = tera(flops.value) if flops else ""
        if ceiling is not None and flops is not None:
            text += f": {MATMUL_SHARE.text(entry.group)} of {ceiling / TERA:,.0f}, the fastest matmul probed"
        single.append(bar_of(label, flops, text, look, scale=TERA))
    axis = per_rank("tokens/s, all GPUs", {entry.run.machine.platform for entry in analysis.peaks})
    return [
        BarPanel("Peak throughput of the whole machine", axis, total).panel("peaks"),
        BarPanel("Compute of each GPU", f"TFLOP/s, {analysis.options.flops_convention} FLOP count", single).panel("peaks"),
    ]


def _of_configurations(analysis: PeakAnalysis, works: Sequence[RankedWorkload], looks: dict[str, Look]) -> list[Panel]:
    shown: dict[int, PeakEntry] = {id(entry.group): entry for entry in analysis.entries[:MOST_CONFIGURATIONS]}
    shares: list[Bar] = []
    steps: list[Bar] = []
    for work in works:
        inside = [(one, shown[id(one.group)]) for one in work.configurations if id(one.group) in shown]
        if work.title and inside:
            shares.append(Bar(label=work.title, value=None, heading=True))
            steps.append(shares[-1])
        for one, entry in inside:
            share, look = entry.utilization, looks.get(one.name)
            shares.append(bar_of(one.label, share, units.percent(share.value if share else None), look, scale=0.01))
            steps.append(bar_of(one.label, entry.mean_step, f"{entry.mean_step.value:.3f} s", look))
    axis = "seconds (lines: 95 % interval; compare within a workload)"
    return [
        BarPanel("Utilization, every configuration", f"% of the {analysis.options.peak} matrix peak", shares).panel("every"),
        BarPanel("Mean step time", axis, steps).panel("every"),
    ]
