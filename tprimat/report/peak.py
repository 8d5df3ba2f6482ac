"""Report an analysis of peak throughput as text (peak_throughput_summary.txt) and as JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tprimat.analyze.compare import Ranking, Verdict
from tprimat.analyze.groups import Group, Measured, on_cpu
from tprimat.analyze.peak import (
    SECONDS_PER_DAY,
    Entry,
    Projection,
    best_of_models,
    unlike,
    workload,
)
from tprimat.analyze.traits import dtype_that_ran
from tprimat.core import units
from tprimat.report.catalogue import (
    COST,
    CPU_CAUTION,
    ENERGY,
    MATMUL_RATE,
    MATMUL_SHARE,
    PEAK_MEMORY,
    RESERVED_MEMORY,
    RUNS,
    STEPS,
    TOKENS,
    TOKENS_OF_ALL,
    Metric,
    heading_of,
    per_rank,
    tera,
)
from tprimat.report.comparison import REPEAT, run_name
from tprimat.report.names import configurations
from tprimat.report.screen import PLAIN, Screen
from tprimat.report.tables import columns, plural, with_interval
from tprimat.report.words import sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakAnalysis:
    """The results of one analysis; without entries where no run counts."""

    counted_as: str
    """How FLOP were counted and which peak they were divided by, in whole sentences."""
    flops_words: str
    """The same for an axis: causal FLOP count."""
    peak_words: str
    """dense matrix peak."""
    entries: Sequence[Entry]
    """Fastest first."""
    peaks: Sequence[Entry]
    verdicts: Sequence[Verdict]
    projections: Sequence[Projection]
    """Of the overall peak."""
    efficiency: float
    by_convention: Sequence[tuple[Entry, Mapping[str, Entry]]]
    """Each peak, counted in every way."""
    notes: Sequence[str]
    rankings: Sequence[Ranking]
    """Of the entries, by their work."""
    leads: Mapping[str, str]
    """Model -> by how much its peak leads the next configuration of its work; without those that lead none."""
    without_rate: Sequence[str]
    """Configurations that ran but have no throughput."""
    not_counted: Sequence[Measured]


Cell = Callable[[Entry], str]


def step_time(entry: Entry) -> str:
    """Format the mean step time of a table, whose interval is that of tokens/s."""
    return _seconds(entry.mean_step.value)


def _seconds(value: float) -> str:
    """Format with four digits from a second to a minute, since steps differ by less than one percent."""
    return f"{units.significant(value, 4)} s" if 1 <= value < 60 else units.seconds(value)


def _column(metric: Metric) -> tuple[str, Cell]:
    return metric.heading, lambda entry: metric.text(entry.group)


PLACE: tuple[tuple[str, Cell], ...] = (("platform", lambda entry: entry.platform), ("model", lambda entry: entry.model))
FIGURES: tuple[tuple[str, Cell], ...] = (
    (TOKENS_OF_ALL.heading, lambda entry: TOKENS_OF_ALL.show(entry.tokens_per_second)),
    (TOKENS.heading, lambda entry: with_interval(entry.per_gpu, TOKENS.show)),
    ("TFLOP/s", lambda entry: tera(entry.flops)),
    ("TFLOP/s/GPU", lambda entry: tera(entry.flops_per_gpu.value if entry.flops_per_gpu else None)),
    ("utilization", lambda entry: units.percent(entry.utilization.value if entry.utilization else None)),
    _column(MATMUL_SHARE),
    ("mean step", step_time),
    *map(_column, (PEAK_MEMORY, RESERVED_MEMORY, COST, ENERGY, RUNS, STEPS)),
)
SPEED = 4
"""Figures of FIGURES without "TFLOP/s" that a wide table shows first: those which rank."""
CONFIGURATION: tuple[tuple[str, Cell], ...] = (
    (
        "sequences",
        lambda entry: f"{units.count(entry.run.ran.global_batch_sequences)} x {units.count(entry.run.ran.sequence_tokens)}",
    ),
    ("micro", lambda entry: units.count(entry.run.ran.micro_batch_sequences)),
)
DTYPE: tuple[str, Cell] = ("dtype", lambda entry: dtype_that_ran(entry.run) or units.ABSENT)
OPTIONAL = {
    *("TFLOP/s", "TFLOP/s/GPU", "utilization"),
    *(metric.heading for metric in (MATMUL_SHARE, PEAK_MEMORY, RESERVED_MEMORY, COST, ENERGY)),
}
"""Left out where no row has them."""
DROP = (
    STEPS.heading,
    RUNS.heading,
    "TFLOP/s",
    ENERGY.heading,
    COST.heading,
    "mean step",
    "micro",
    "sequences",
    MATMUL_SHARE.heading,
    RESERVED_MEMORY.heading,
    PEAK_MEMORY.heading,
    "TFLOP/s/GPU",
    "dtype",
    "utilization",
    TOKENS_OF_ALL.heading,
)
"""Columns in the order in which a narrow terminal loses them."""


def table(entries: Sequence[Entry], shown: Sequence[tuple[str, Cell]], left: int, screen: Screen = PLAIN) -> str:
    """Format columns of text, optional ones only where a row has a value."""
    cells = {name: [cell(entry) for entry in entries] for name, cell in shown}
    headings = [name for name in cells if name not in OPTIONAL or any(cell != units.ABSENT for cell in cells[name])]
    if RESERVED_MEMORY.heading in headings and not any(RESERVED_MEMORY.fills(entry.group) for entry in entries):
        headings.remove(RESERVED_MEMORY.heading)
    per_gpu = heading_of(TOKENS, [entry.group for entry in entries])
    return columns(
        [per_gpu if name == TOKENS.heading else name for name in headings],
        [list(row) for row in zip(*(cells[name] for name in headings), strict=True)],
        left=left,
        screen=screen,
        drop=DROP,
    )


def text(analysis: PeakAnalysis, *, show_all: bool, screen: Screen = PLAIN) -> str:
    """Format the whole analysis, with every configuration or with the peaks only."""
    parts = [_overall(analysis, screen), *_tables(analysis, show_all, screen)]
    parts += [*_projection(analysis, screen), *_conventions(analysis, screen)]
    remarks = [screen.prose(line, 2) for line in (*map(sentence, analysis.verdicts), *analysis.notes)]
    if remarks:
        parts.append(_section("Remarks", "\n".join(remarks), screen))
    left_out = [f"{run_name(item)}: {item.not_counted}" for item in analysis.not_counted]
    left_out += [f"{label}: no throughput, since its tokens or its GPUs are not recorded" for label in analysis.without_rate]
    if left_out:
        lines = [screen.prose(line, 2, "refused") for line in left_out]
        parts.append(_section("Not counted", "\n".join(lines), screen))
    return "\n\n".join(parts) + "\n"


def _section(title: str, body: str, screen: Screen) -> str:
    return f"{screen.paint(title, 'heading')}\n{'=' * len(title)}\n{body}"


def _overall(analysis: PeakAnalysis, screen: Screen) -> str:
    if not analysis.peaks:
        way_out = f" {REPEAT}" if analysis.not_counted else ""
        return _section("Overall peak throughput", screen.prose(f"None: no run counts.{way_out}", 2), screen)
    best = best_of_models(analysis.peaks)
    body = "\n\n".join(_best(analysis, entry, screen) for entry in best[:MOST_MODELS])
    words = [CPU_CAUTION] if any(on_cpu([entry.group]) for entry in analysis.entries) else []
    if len(best) > 1:
        more = f" {plural(len(best) - MOST_MODELS, 'more model')} in the table." if len(best) > MOST_MODELS else ""
        words.append(f"Models do not compare by tokens/s: these are the best of each.{more}")
    words.append(analysis.counted_as)
    return _section("Overall peak throughput", "\n\n".join([body, *map(screen.prose, words)]), screen)


MOST_MODELS = 3
"""Models whose best configuration is described in full; the table has them all."""


def _best(analysis: PeakAnalysis, best: Entry, screen: Screen) -> str:
    """Describe the best configuration of a model."""
    runs = plural(len(best.group.runs), "run")
    lead = analysis.leads.get(best.model)
    rows = [
        ("best configuration", f"{best.model} on {best.platform}: {best.configuration}, engine {best.run.engine}"),
        *_work(analysis, best),
        ("throughput", f"{TOKENS_OF_ALL.show(best.tokens_per_second)} tokens/s"),
        (per_rank("per GPU", {best.run.machine.platform}), f"{with_interval(best.per_gpu, TOKENS.show)} tokens/s"),
        *_compute(best),
        *([("lead", lead)] if lead else []),
        ("mean step time", f"{with_interval(best.mean_step, _seconds)} over {best.steps} steady steps, {runs}"),
        *([] if on_cpu([best.group]) else [("in 24 hours", _day(best))]),
    ]
    return "\n".join(
        screen.prose(f"  {label:<20}{value}", 22, "winner" if label == rows[0][0] else None) for label, value in rows
    )


def _work(analysis: PeakAnalysis, best: Entry) -> list[tuple[str, str]]:
    """Say what the best configuration did, and which others it is not ranked with because they did something else."""
    apart = unlike(best, analysis.entries)
    if not apart:
        return [("work", workload(best.run))]
    traits = {trait.key: trait for found in apart for trait in found}
    own = [trait.words[0] for key, trait in traits.items() if key not in IN_WORKLOAD]
    names = ", ".join(trait.name for trait in traits.values())
    decides = "" if best.flops is None else "; the best of unlike work is the one with the most model FLOP/s"
    others = f"{plural(len(apart), 'configuration')} of this model that did other work ({names}){decides}"
    return [("work", ", ".join([workload(best.run), *own])), ("not compared", others)]


IN_WORKLOAD = ("model", "gpus", "tokens", "sequence", "dtype", "routing")
"""Traits that the description of work or machine names."""


def _compute(entry: Entry) -> list[tuple[str, str]]:
    rows = []
    if entry.flops is not None and entry.flops_per_gpu is not None:
        total, single = units.teraflops(entry.flops), units.teraflops(entry.flops_per_gpu.value)
        rows.append(("compute", f"{total} total, {single} per GPU"))
    if entry.utilization is not None and entry.peak_flops is not None:
        rows.append(("utilization", f"{units.percent(entry.utilization.value)} of {units.teraflops(entry.peak_flops)} per GPU"))
    elif entry.utilization_absent_because:
        rows.append(("utilization", f"{units.ABSENT} ({entry.utilization_absent_because})"))
    if MATMUL_SHARE.of_group(entry.group) is not None:
        share, ceiling = MATMUL_SHARE.text(entry.group), MATMUL_RATE.text(entry.group)
        rows.append((MATMUL_SHARE.heading, f"{share} of the fastest product probed on this machine ({ceiling})"))
    return rows


def _day(entry: Entry) -> str:
    tokens = f"{units.count(int(entry.tokens_per_day))} tokens ({units.billions(entry.tokens_per_day)})"
    if entry.samples_per_day is None:
        return tokens
    return f"{tokens}, {units.count(int(entry.samples_per_day))} samples of {units.count(entry.run.ran.sequence_tokens)} tokens"


def _tables(analysis: PeakAnalysis, show_all: bool, screen: Screen) -> list[str]:
    if not analysis.peaks:
        return []
    parts = [_section("Peak by platform and model", table(analysis.peaks, (*PLACE, *FIGURES), 2, screen), screen)]
    if show_all:
        figures = [column for column in FIGURES if column[0] != "TFLOP/s"]
        first, others = figures[:SPEED], figures[SPEED:]
        places: dict[tuple[str, str], list[Group]] = {}
        for entry in analysis.entries:
            places.setdefault((entry.platform, entry.model), []).append(entry.group)
        called = {id(one.group): one.label for alike in places.values() for one in configurations(alike)}
        name = ("configuration", lambda entry: called[id(entry.group)])
        body = table(analysis.entries, (*PLACE, name, DTYPE, *first, *CONFIGURATION, *others), 3, screen)
        parts.append(_section("All configurations", body, screen))
    elif len(analysis.entries) > len(analysis.peaks):
        rest = len(analysis.entries) - len(analysis.peaks)
        parts[0] += f"\n({rest} more configuration{'s' * (rest > 1)}: --show-all)"
    return parts


def _projection(analysis: PeakAnalysis, screen: Screen) -> list[str]:
    if not analysis.projections:
        return []
    best = analysis.peaks[0]
    share = units.percent(analysis.efficiency, 0)
    header = ["nodes", "GPUs", "tokens/s, linear", "TFLOP/s, linear", f"tokens/s at {share}", "tokens a day, linear"]
    header.append(f"a day at {share}")
    rows = [
        [
            units.count(row.nodes),
            units.count(row.gpus),
            TOKENS_OF_ALL.show(row.linear_tokens_per_second),
            tera(row.linear_flops),
            TOKENS_OF_ALL.show(row.tokens_per_second),
            units.billions(row.linear_tokens_per_second * SECONDS_PER_DAY),
            units.billions(row.tokens_per_second * SECONDS_PER_DAY),
        ]
        for row in analysis.projections
    ]
    nodes = best.run.machine.nodes or 1
    measured = f"{nodes} node{'s' * (nodes > 1)}"
    source = f"Assumed, not measured, beyond {measured}; python3 -m tprimat scaling judges measured runs."
    drop = ("TFLOP/s, linear", "tokens a day, linear", f"a day at {share}")
    body = columns(header, rows, left=0, screen=screen, drop=drop)
    return [_section(f"More nodes: {best.model} on {best.platform}", f"{body}\n{screen.prose(source)}", screen)]


def _conventions(analysis: PeakAnalysis, screen: Screen) -> list[str]:
    found = [(entry, counted) for entry, counted in analysis.by_convention if any(row.utilization for row in counted.values())]
    if not found:
        return []
    header = ["platform", "model", "counted as", "tokens/s", "TFLOP/s", "TFLOP/s/GPU", "peak", "utilization"]
    rows = []
    for entry, counted in found:
        for name, row in counted.items():
            single = tera(row.flops_per_gpu.value if row.flops_per_gpu else None)
            share = units.percent(row.utilization.value if row.utilization else None)
            figures = [TOKENS_OF_ALL.show(row.tokens_per_second), tera(row.flops), single, tera(row.peak_flops), share]
            rows.append([entry.platform, entry.model, name, *figures])
    body = columns(header, rows, left=3, screen=screen, drop=("peak", "TFLOP/s", "tokens/s"))
    why = "\n".join(Screen(width=screen.width or WIDEST_LINE).prose(line, 2) for line in WHY)
    return [_section("The same runs by other conventions", f"{body}\n\n{why}", screen)]


WIDEST_LINE = 128
"""Columns of an explanation in a file."""
WHY = (
    "causal, dense peak: 6 x the weights that multiply a token, plus the half of the attention square that a causal mask needs, "
    "against the peak of the dtype that ran, without sparsity. This is what the tables above use unless told otherwise.",
    "full: the whole attention square, of which a causal mask throws half away.",
    "6n: 6 x all weights. It counts the input embedding, which is looked up and not multiplied, and no attention at all: "
    "too much at short sequences, too little at long ones.",
    "sparse peak: holds for weights with two of four entries zero. Dense training cannot reach more than half of it.",
    "first TPrimat: 6n of sizes rounded to 8.0 and 7.6 billion, H100 against its sparse peak and MI300X against its dense one, "
    "so that the two utilizations do not compare; and the tokens/s that a file states, whatever its steps say.",
)


def as_document(analysis: PeakAnalysis) -> dict[str, Any]:
    """Return the analysis as one JSON document, unrounded, in SI units."""
    return {
        "counted_as": analysis.counted_as,
        "overall_peak": _entry(analysis.peaks[0]) if analysis.peaks else None,
        "peaks": [_entry(entry) for entry in analysis.peaks],
        "configurations": [_entry(entry) for entry in analysis.entries],
        "projections": [
            {
                "nodes": row.nodes,
                "gpus": row.gpus,
                "linear_tokens_per_second": row.linear_tokens_per_second,
                "tokens_per_second": row.tokens_per_second,
                "linear_flops_per_second": row.linear_flops,
                "efficiency": analysis.efficiency,
            }
            for row in analysis.projections
        ],
        "by_convention": [
            {"platform": entry.platform, "model": entry.model, "counted_as": name, **_figures(row)}
            for entry, counted in analysis.by_convention
            for name, row in counted.items()
        ],
        "remarks": [*map(sentence, analysis.verdicts), *analysis.notes],
        "not_counted": [{"run": run_name(item), "because": item.not_counted} for item in analysis.not_counted],
        "without_throughput": list(analysis.without_rate),
    }


def _entry(entry: Entry) -> dict[str, Any]:
    run = entry.run
    return {
        "platform": entry.platform,
        "accelerator": run.machine.accelerator,
        "gpus": entry.gpus,
        "model": entry.model,
        "strategy": run.strategy,
        "configuration": entry.configuration,
        "engine": run.engine,
        "matmul_dtype": run.ran.matmul_dtype,
        "global_batch_sequences": run.ran.global_batch_sequences,
        "sequence_tokens": run.ran.sequence_tokens,
        **_figures(entry),
        "step_seconds": entry.mean_step.value,
        "step_seconds_low": entry.mean_step.low,
        "step_seconds_high": entry.mean_step.high,
        "tokens_per_day": entry.tokens_per_day,
        "samples_per_day": entry.samples_per_day,
        **{metric.key: metric.value(entry.group) for metric in (PEAK_MEMORY, RESERVED_MEMORY, COST, ENERGY)},
        "runs": [item.result.run.run_id for item in entry.group.runs],
        "steady_steps": entry.steps,
    }


def _figures(entry: Entry) -> dict[str, Any]:
    flops, share = entry.flops_per_gpu, entry.utilization
    return {
        "tokens_per_second": entry.tokens_per_second,
        "tokens_per_second_per_gpu": entry.per_gpu.value,
        "tokens_per_second_per_gpu_low": entry.per_gpu.low,
        "tokens_per_second_per_gpu_high": entry.per_gpu.high,
        "flops_per_second": entry.flops,
        "flops_per_second_per_gpu": flops.value if flops else None,
        "peak_flops_per_gpu": entry.peak_flops,
        "utilization": share.value if share else None,
        "utilization_absent_because": entry.utilization_absent_because,
        **{metric.key: metric.value(entry.group) for metric in (MATMUL_SHARE, MATMUL_RATE)},
    }
