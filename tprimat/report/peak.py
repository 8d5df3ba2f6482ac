"""The analysis of peak throughput in words and figures, for a terminal and for peak_throughput_summary.txt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tprimat import units
from tprimat.analyze.compare import Verdict
from tprimat.analyze.groups import Measured
from tprimat.analyze.peak import SECONDS_PER_DAY, Entry, Projection, configuration_names, workload
from tprimat.report.comparison import sentence
from tprimat.report.summary import with_interval
from tprimat.report.tables import columns


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakAnalysis:
    """All that one analysis found. No entries: nothing counted."""

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
    by_yardstick: Sequence[tuple[Entry, Mapping[str, Entry]]]
    """Each peak, counted in every way."""
    notes: Sequence[str]
    without_rate: Sequence[str]
    """Configurations that ran but have no throughput."""
    not_counted: Sequence[Measured]


Cell = Callable[[Entry], str]


def tera(value: float | None) -> str:
    """A rate in TFLOP/s without the unit, for columns and sentences that name it."""
    return units.teraflops(value).removesuffix(" TFLOP/s")


def step_time(made: Entry) -> str:
    """Mean step time; from a second to a minute with four digits, since steps differ by less than one percent."""
    value = made.mean_step_seconds
    return f"{units.significant(value, 4)} s" if 1 <= value < 60 else units.seconds(value)


PLACE: tuple[tuple[str, Cell], ...] = (("platform", lambda made: made.platform), ("model", lambda made: made.model))
FIGURES: tuple[tuple[str, Cell], ...] = (
    ("tokens/s", lambda made: units.count(made.tokens_per_second)),
    ("tokens/s/GPU", lambda made: with_interval(made.per_gpu, units.count)),
    ("TFLOP/s", lambda made: tera(made.flops)),
    ("TFLOP/s/GPU", lambda made: tera(made.flops_per_gpu.value if made.flops_per_gpu else None)),
    ("utilization", lambda made: units.percent(made.utilization.value if made.utilization else None)),
    ("of measured matmul", lambda made: units.percent(made.share_of_measured_gemm)),
    ("step time", step_time),
    ("peak memory", lambda made: units.gibibytes(made.peak_memory_bytes)),
    ("cost/M tokens", lambda made: _number(made.cost_per_million_tokens)),
    ("energy/token", lambda made: units.si(made.joules_per_token, "J")),
    ("runs", lambda made: str(len(made.group.runs))),
    ("steps", lambda made: str(made.steps)),
)
CONFIGURATION: tuple[tuple[str, Cell], ...] = (
    ("batch", lambda made: units.count(made.run.global_batch_sequences)),
    ("micro", lambda made: units.count(made.run.micro_batch_sequences)),
    ("sequence", lambda made: units.count(made.run.sequence_tokens)),
    ("dtype", lambda made: made.run.matmul_dtype or units.ABSENT),
)
OPTIONAL = {"TFLOP/s", "TFLOP/s/GPU", "utilization", "of measured matmul", "peak memory", "cost/M tokens", "energy/token"}
"""Left out where no row has them."""


def _number(value: float | None) -> str:
    return units.ABSENT if value is None else units.significant(value)


def table(entries: Sequence[Entry], shown: Sequence[tuple[str, Cell]], left: int) -> str:
    """Columns of text; optional ones only where a row has a value."""
    cells = {name: [cell(made) for made in entries] for name, cell in shown}
    kept = [name for name in cells if name not in OPTIONAL or any(cell != units.ABSENT for cell in cells[name])]
    return columns(kept, [list(row) for row in zip(*(cells[name] for name in kept), strict=True)], left=left)


def text(analysis: PeakAnalysis, *, show_all: bool) -> str:
    """The whole analysis; with every configuration, or with the peaks only."""
    parts = [_overall(analysis), *_tables(analysis, show_all), *_projection(analysis), *_yardsticks(analysis)]
    remarks = [*map(sentence, analysis.verdicts), *analysis.notes]
    if remarks:
        parts.append(_section("Remarks", "\n".join(remarks)))
    left_out = [f"{name_of(item)}: {item.not_counted}" for item in analysis.not_counted]
    left_out += [f"{label}: no throughput, since its tokens or its GPUs are not recorded" for label in analysis.without_rate]
    if left_out:
        parts.append(_section("Not counted", "\n".join(left_out)))
    return "\n\n".join(parts) + "\n"


def name_of(item: Measured) -> str:
    """The run's id; a file of another program has none of its own, so its path."""
    return str(item.result.path) if item.result.path.is_file() else item.result.run.run_id


def _section(title: str, body: str) -> str:
    return f"{title}\n{'=' * len(title)}\n{body}"


def _overall(analysis: PeakAnalysis) -> str:
    if not analysis.peaks:
        return _section("Overall peak throughput", "None: no run counts.")
    best = analysis.peaks[0]
    rows = [
        ("best configuration", f"{best.model} on {best.platform}: {best.configuration}, engine {best.run.engine}"),
        ("work", workload(best.run)),
        ("throughput", f"{units.count(best.tokens_per_second)} tokens/s"),
        ("per GPU", f"{with_interval(best.per_gpu, units.count)} tokens/s"),
        *_compute(best),
        ("step time", f"{step_time(best)}, mean of {best.steps} steady steps, {_runs(best)}"),
        ("in 24 hours", _day(best)),
    ]
    body = "\n".join(f"  {label:<20}{value}" for label, value in rows)
    return _section("Overall peak throughput", f"{body}\n\n{analysis.counted_as}")


def _runs(made: Entry) -> str:
    count = len(made.group.runs)
    return f"{count} run{'s' * (count > 1)}"


def _compute(made: Entry) -> list[tuple[str, str]]:
    rows = []
    if made.flops is not None and made.flops_per_gpu is not None:
        total, single = units.teraflops(made.flops), units.teraflops(made.flops_per_gpu.value)
        rows.append(("compute", f"{total} total, {single} per GPU"))
    if made.utilization is not None and made.peak_flops is not None:
        rows.append(("utilization", f"{units.percent(made.utilization.value)} of {units.teraflops(made.peak_flops)} per GPU"))
    elif made.utilization_absent_because:
        rows.append(("utilization", f"{units.ABSENT} ({made.utilization_absent_because})"))
    if made.share_of_measured_gemm is not None:
        share = units.percent(made.share_of_measured_gemm)
        ceiling = units.si(made.measured_gemm_flops, "FLOP/s")
        rows.append(("of measured matmul", f"{share} of the fastest product probed on this machine ({ceiling})"))
    return rows


def _day(made: Entry) -> str:
    tokens = f"{units.count(int(made.tokens_per_day))} tokens ({units.billions(made.tokens_per_day)})"
    if made.samples_per_day is None:
        return tokens
    return f"{tokens}, {units.count(int(made.samples_per_day))} samples of {units.count(made.run.sequence_tokens)} tokens"


def _tables(analysis: PeakAnalysis, show_all: bool) -> list[str]:
    if not analysis.peaks:
        return []
    parts = [_section("Peak by platform and model", table(analysis.peaks, (*PLACE, *FIGURES), left=2))]
    if show_all:
        figures = [column for column in FIGURES if column[0] != "TFLOP/s"]
        called = dict(zip(map(id, analysis.entries), configuration_names(analysis.entries), strict=True))
        name = ("configuration", lambda made: called[id(made)])
        body = table(analysis.entries, (*PLACE, name, *CONFIGURATION, *figures), left=3)
        parts.append(_section("All configurations", body))
    elif len(analysis.entries) > len(analysis.peaks):
        rest = len(analysis.entries) - len(analysis.peaks)
        parts[0] += f"\n({rest} more configuration{'s' * (rest > 1)}: --show-all)"
    return parts


def _projection(analysis: PeakAnalysis) -> list[str]:
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
            units.count(row.linear_tokens_per_second),
            tera(row.linear_flops),
            units.count(row.tokens_per_second),
            units.billions(row.linear_tokens_per_second * SECONDS_PER_DAY),
            units.billions(row.tokens_per_second * SECONDS_PER_DAY),
        ]
        for row in analysis.projections
    ]
    nodes = best.run.machine.nodes or 1
    measured = f"{nodes} node{'s' * (nodes > 1)}"
    source = f"Assumed, not measured, beyond {measured}; python -m tprimat.cli.scaling judges measured runs."
    return [_section(f"More nodes: {best.model} on {best.platform}", f"{columns(header, rows, left=0)}\n{source}")]


def _yardsticks(analysis: PeakAnalysis) -> list[str]:
    found = [(made, counted) for made, counted in analysis.by_yardstick if any(row.utilization for row in counted.values())]
    if not found:
        return []
    header = ["platform", "model", "counted as", "tokens/s", "TFLOP/s", "TFLOP/s/GPU", "peak", "utilization"]
    rows = []
    for made, counted in found:
        for name, row in counted.items():
            single = tera(row.flops_per_gpu.value if row.flops_per_gpu else None)
            share = units.percent(row.utilization.value if row.utilization else None)
            figures = [units.count(row.tokens_per_second), tera(row.flops), single, tera(row.peak_flops), share]
            rows.append([made.platform, made.model, name, *figures])
    return [_section("The same runs by other conventions", columns(header, rows, left=3) + "\n\n" + "\n".join(WHY))]


WHY = (
    "causal, dense peak: 6 x the weights that multiply a token, plus the half of the attention square that a causal mask needs,",
    "  against the peak of the dtype that ran, without sparsity. This is what the tables above use unless told otherwise.",
    "full: the whole attention square, of which a causal mask throws half away.",
    "6n: 6 x all weights. It counts the input embedding, which is looked up and not multiplied, and no attention at all:",
    "  too much at short sequences, too little at long ones.",
    "sparse peak: holds for weights with two of four entries zero. Dense training cannot reach more than half of it.",
    "first TPrimat: 6n of sizes rounded to 8.0 and 7.6 billion, H100 against its sparse peak and MI300X against its dense one,",
    "  so that the two utilizations do not compare; and the tokens/s that a file states, whatever its steps say.",
)


# The analysis of peak throughput as data, unrounded, in SI units.


def as_document(analysis: PeakAnalysis) -> dict[str, Any]:
    """One JSON document."""
    return {
        "counted_as": analysis.counted_as,
        "overall_peak": _entry(analysis.peaks[0]) if analysis.peaks else None,
        "peaks": [_entry(made) for made in analysis.peaks],
        "configurations": [_entry(made) for made in analysis.entries],
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
            {"platform": made.platform, "model": made.model, "counted_as": name, **_figures(row)}
            for made, counted in analysis.by_yardstick
            for name, row in counted.items()
        ],
        "remarks": [*map(sentence, analysis.verdicts), *analysis.notes],
        "not_counted": [{"run": name_of(item), "because": item.not_counted} for item in analysis.not_counted],
        "without_throughput": list(analysis.without_rate),
    }


def _entry(made: Entry) -> dict[str, Any]:
    run = made.run
    return {
        "platform": made.platform,
        "accelerator": run.machine.accelerator,
        "gpus": made.gpus,
        "model": made.model,
        "strategy": run.strategy,
        "configuration": made.configuration,
        "engine": run.engine,
        "matmul_dtype": run.matmul_dtype,
        "global_batch_sequences": run.global_batch_sequences,
        "sequence_tokens": run.sequence_tokens,
        **_figures(made),
        "step_seconds": made.mean_step_seconds,
        "tokens_per_day": made.tokens_per_day,
        "samples_per_day": made.samples_per_day,
        "peak_memory_bytes": made.peak_memory_bytes,
        "cost_per_million_tokens": made.cost_per_million_tokens,
        "joules_per_token": made.joules_per_token,
        "runs": [item.result.run.run_id for item in made.group.runs],
        "steady_steps": made.steps,
    }


def _figures(made: Entry) -> dict[str, Any]:
    flops, share = made.flops_per_gpu, made.utilization
    return {
        "tokens_per_second": made.tokens_per_second,
        "tokens_per_second_per_gpu": made.per_gpu.value,
        "tokens_per_second_per_gpu_low": made.per_gpu.low,
        "tokens_per_second_per_gpu_high": made.per_gpu.high,
        "flops_per_second": made.flops,
        "flops_per_second_per_gpu": flops.value if flops else None,
        "peak_flops_per_gpu": made.peak_flops,
        "utilization": share.value if share else None,
        "utilization_absent_because": made.utilization_absent_because,
        "share_of_measured_gemm": made.share_of_measured_gemm,
        "measured_gemm_flops": made.measured_gemm_flops,
    }
