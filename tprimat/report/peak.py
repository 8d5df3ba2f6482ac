"""Report an analysis of peak throughput as text (peak_throughput_summary.txt) and as JSON."""

from collections.abc import Callable
from typing import Any

from tprimat.analyze.groups import Group, Measured, findings, on_cpu
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.peak import SECONDS_PER_DAY, PeakAnalysis, PeakEntry, best_of_models
from tprimat.analyze.traits import dtype_that_ran, machine_name, model_and_shape
from tprimat.core import units
from tprimat.core.rows import placed
from tprimat.report import catalogue
from tprimat.report.catalogue import TOKENS, TOKENS_OF_ALL, Metric, per_rank, tera
from tprimat.report.comparison import REPEAT
from tprimat.report.names import configurations, heading
from tprimat.report.tables import PLAIN, Screen, columns, plural, with_interval
from tprimat.report.words import headline, not_counted_words, run_name, sentence, told, without_mfu

MOST_MODELS = 3
"""Models whose best configuration is described in full; the table has them all."""


def counted_as(options: MetricOptions) -> str:
    """Say in words how metrics are counted."""
    return (
        f"FLOP counted {options.flops_convention}; utilization is of the {options.peak} peak of the dtype that ran. "
        "[low, high]: 95 % interval between runs,\nor between the steps of a single run."
    )


PeakCell = Callable[[PeakEntry], str]


def _column(metric: Metric) -> tuple[str, PeakCell]:
    return metric.heading, lambda entry: metric.text(entry.group) if metric.fills(entry.group) else units.ABSENT


OF_THE_MACHINE = (catalogue.MATMUL_SHARE, catalogue.PEAK_MEMORY, catalogue.RESERVED_MEMORY)
COSTS = (catalogue.COST, catalogue.ENERGY)
FIGURES: tuple[tuple[str, PeakCell], ...] = (
    (TOKENS.heading, lambda entry: with_interval(entry.per_gpu, TOKENS.show)),
    (TOKENS_OF_ALL.heading, lambda entry: TOKENS_OF_ALL.show(entry.tokens_per_second)),
    ("utilization", lambda entry: units.percent(entry.utilization.value if entry.utilization else None)),
    ("dtype", lambda entry: dtype_that_ran(entry.run) or units.ABSENT),
    ("TFLOP/s/GPU", lambda entry: tera(entry.flops_per_gpu.value if entry.flops_per_gpu else None)),
    ("mean step", lambda entry: f"{entry.mean_step.value:.3f} s"),
    *map(_column, OF_THE_MACHINE),
    ("sequence", lambda entry: units.count(entry.run.ran.sequence_tokens)),
    ("micro", lambda entry: units.count(entry.run.ran.micro_batch_sequences)),
    *map(_column, (*COSTS, catalogue.RUNS, catalogue.STEPS)),
)
"""A narrow terminal loses the last ones first."""


def text(analysis: PeakAnalysis, *, show_all: bool, screen: Screen = PLAIN) -> str:
    """Format the whole analysis, with every configuration or with the peaks only."""
    parts = [_overall(analysis, screen), *_tables(analysis, show_all, screen)]
    parts += _projection(analysis, screen)
    if remarks := [screen.prose(line, 2) for line in _remarks(analysis)]:
        parts.append(_section("Remarks", "\n".join(remarks)))
    left_out = [f"{run_name(item)}: {not_counted_words(item)}" for item in analysis.not_counted]
    left_out += [f"{label}: no throughput, since its tokens or its GPUs are not recorded" for label in analysis.without_rate]
    if left_out:
        parts.append(_section("Not counted", "\n".join(screen.prose(line, 2) for line in left_out)))
    return "\n\n".join(parts) + "\n"


def _section(title: str, body: str) -> str:
    return f"{title}\n{'=' * len(title)}\n{body}"


def _remarks(analysis: PeakAnalysis) -> list[str]:
    """Return the verdicts on the peaks of one model, and what to know of the peaks."""

    def place(item: Measured) -> str:
        return f"{model_and_shape(item.result.run)} on {machine_name(item.result.run)}"

    known = findings((entry.group for entry in analysis.peaks), place)
    return [*map(sentence, analysis.verdicts), *told(known)]


def _overall(analysis: PeakAnalysis, screen: Screen) -> str:
    if not analysis.peaks:
        way_out = f" {REPEAT}" if analysis.not_counted else ""
        return _section("Overall peak throughput", screen.prose(f"None: no run counts.{way_out}", 2))
    best = best_of_models(analysis.peaks)
    body = "\n\n".join(_best(analysis, entry, screen) for entry in best[:MOST_MODELS])
    words = [catalogue.CPU_CAUTION] if any(on_cpu([entry.group]) for entry in analysis.entries) else []
    if len(best) > 1:
        more = f" {plural(len(best) - MOST_MODELS, 'more model')} in the table." if len(best) > MOST_MODELS else ""
        words.append(f"Tokens/s do not compare models: each of these is the best of its model.{more}")
    words.append(counted_as(analysis.options))
    return _section("Overall peak throughput", "\n\n".join([body, *map(screen.prose, words)]))


def _best(analysis: PeakAnalysis, best: PeakEntry, screen: Screen) -> str:
    run, group = best.run, best.group
    ranking = next(one for one in analysis.rankings if group in one.groups)
    gpu, each = per_rank("GPU", {run.machine.platform}), with_interval(best.per_gpu, TOKENS.show)
    step = with_interval(best.mean_step, lambda value: f"{value:.4g} s")
    total, single = units.teraflops(best.flops), units.teraflops(best.flops_per_gpu.value if best.flops_per_gpu else None)
    share = f", {units.percent(best.utilization.value)} of {units.teraflops(best.peak_flops)}" if best.utilization else ""
    products, rate = catalogue.MATMUL_SHARE, catalogue.MATMUL_RATE.text(group)
    matmul = f"{products.text(group)} of the fastest product probed on this machine ({rate})"
    folder = f", folder {group.folder}" if group.folder else ""
    rows = {
        "best configuration": f"{best.model} on {best.platform}: {best.configuration}, engine {run.engine}{folder}",
        "work": heading(ranking),
        "throughput": f"{TOKENS_OF_ALL.show(best.tokens_per_second)} tokens/s, {each} per {gpu}",
        "compute": f"{total} total, {single} per GPU{share}" if best.flops_per_gpu else "",
        products.heading: matmul if products.fills(group) else "",
        "lead": " ".join(headline(ranking)) if ranking.best is group else "",
        "mean step time": f"{step} over {best.steps} steady steps, {plural(len(group.runs), 'run')}",
        "in 24 hours": "" if on_cpu([group]) else _day(best),
    }
    return "\n".join(screen.prose(f"  {label:<20}{value}", 22) for label, value in rows.items() if value)


def _day(entry: PeakEntry) -> str:
    tokens = f"{units.count(int(entry.tokens_per_day))} tokens ({units.billions(entry.tokens_per_day)})"
    if entry.samples_per_day is None:
        return tokens
    return f"{tokens}, {units.count(int(entry.samples_per_day))} samples of {units.count(entry.run.ran.sequence_tokens)} tokens"


def _tables(analysis: PeakAnalysis, show_all: bool, screen: Screen) -> list[str]:
    """Return one table: of every configuration, or of the peaks."""
    if not analysis.peaks:
        return []
    places: dict[tuple[str, str], list[Group]] = {}
    for entry in analysis.entries:
        places.setdefault((entry.platform, entry.model), []).append(entry.group)
    called = {id(one.group): one.label for alike in places.values() for one in configurations(alike)}
    entries, title = analysis.peaks, "Peak by platform and model"
    if show_all:
        entries, title = analysis.entries, "All configurations"
    per_gpu = catalogue.heading_of(TOKENS, [entry.group for entry in entries])
    header = ["platform", "model", "configuration", *(per_gpu if name == TOKENS.heading else name for name, _ in FIGURES)]
    rows = [[entry.platform, entry.model, called[id(entry.group)], *(cell(entry) for _, cell in FIGURES)] for entry in entries]
    rest = len(analysis.entries) - len(entries)
    more = f"\n({plural(rest, 'more configuration')}: --show-all)" if rest else ""
    return [_section(title, columns(header, rows, left=3, screen=screen) + more)]


def _projection(analysis: PeakAnalysis, screen: Screen) -> list[str]:
    if not analysis.projections:
        return []
    best, share = analysis.peaks[0], units.percent(analysis.efficiency, 0)
    header = ["nodes", "GPUs", "tokens/s, linear", f"tokens/s at {share}", f"tokens a day at {share}"]
    rows = [
        [
            units.count(row["nodes"]),
            units.count(row["gpus"]),
            TOKENS_OF_ALL.show(row["linear_tokens_per_second"]),
            TOKENS_OF_ALL.show(row["tokens_per_second"]),
            units.billions(row["tokens_per_second"] * SECONDS_PER_DAY),
        ]
        for row in analysis.projections
    ]
    measured = plural(best.run.machine.nodes or 1, "node")
    source = f"Assumed, not measured, beyond {measured}; python3 -m tprimat scaling judges measured runs."
    body = f"{columns(header, rows, left=0, screen=screen)}\n{screen.prose(source)}"
    return [_section(f"More nodes: {best.model} on {best.platform}", body)]


def as_document(analysis: PeakAnalysis) -> dict[str, Any]:
    """Return the analysis as one JSON document, unrounded, in SI units."""
    return {
        "counted_as": counted_as(analysis.options),
        "overall_peak": _entry(analysis.peaks[0]) if analysis.peaks else None,
        "peaks": [_entry(entry) for entry in analysis.peaks],
        "configurations": [_entry(entry) for entry in analysis.entries],
        "projections": list(analysis.projections),
        "remarks": _remarks(analysis),
        "not_counted": [{"run": run_name(item), "because": not_counted_words(item)} for item in analysis.not_counted],
        "without_throughput": list(analysis.without_rate),
    }


def _entry(entry: PeakEntry) -> dict[str, Any]:
    metrics = (catalogue.MATMUL_RATE, *OF_THE_MACHINE, *COSTS)
    return {
        **placed("documents.peak", entry=entry, run=entry.run),
        "utilization_absent_because": without_mfu(entry.group.runs[0].metrics) or None,
        **{metric.key: metric.value(entry.group) for metric in metrics},
        "runs": [item.result.run.run_id for item in entry.group.runs],
    }
