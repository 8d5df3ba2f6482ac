"""Summarize the runs of one ./benchmark.py call, as text and as a JSON document."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tprimat.analyze.groups import Group
from tprimat.analyze.metrics import drops_choices
from tprimat.analyze.traits import TRAITS, dtype_that_ran, on_nodes
from tprimat.core import units
from tprimat.records.evidence import other_notes
from tprimat.records.schema import RunMetrics, RunRecord
from tprimat.records.store import as_document
from tprimat.report import catalogue
from tprimat.report.catalogue import FLOPS, MATMUL_RATE, MEMORY_ERROR, MFU, STEP_ERROR, STEP_TIME, TOKENS, TOKENS_OF_ALL, per_rank
from tprimat.report.tables import PLAIN, Screen
from tprimat.report.words import finding_words, rule_words, without_mfu

Row = tuple[RunRecord, RunMetrics | str | None, Path]
"""A run, its metrics or the reason why there are none, and its log."""
VALUES = 17
"""Column in which values begin."""
QUIET = ("note", "start", "steady steps")
"""Labels of lines that say how a run went."""
Lines = list[tuple[str, str | None]]
"""Label and text of each line of a run; one without a text is left out."""


def summary(rows: Sequence[Row], screen: Screen = PLAIN, groups: Sequence[Group] = ()) -> str:
    """Format one block per run: what ran, how fast, with which uncertainty, and notes.

    `groups` are those of a call of several runs, whose notes follow once: runs that are repetitions share a block of their means,
    with a line for each, and blocks lack the quiet lines of the runs that count.
    """
    whose = {id(item.result.run): group for group in groups for item in group.runs if len(group.runs) > 1}
    alike = [(run.model, run.strategy, run.workload) for run, *_ in rows]
    numbers = {id(run): alike[:place].count(alike[place - 1]) for place, (run, *_) in enumerate(rows, 1)}
    blocks: dict[int, str] = {}
    for run, metrics, log in rows:
        group = whose.get(id(run))
        lines = [screen.prose(_heading(run) + (f" · mean of {len(group.runs)} runs" if group else ""), 2)]
        for label, text in _block(run, metrics, log, group, numbers):
            if text and not (groups and run.counts and (label in QUIET or text.startswith(units.ABSENT))):
                lines.append(screen.prose(f"  {label:<{VALUES - 3}} {text}", VALUES))
        blocks[id(group or run)] = "\n".join(lines)
    return "\n\n".join(blocks.values())


def _heading(run: RunRecord) -> str:
    gpus, ran = run.machine.gpus, run.ran
    ranks = per_rank("GPU" if gpus == 1 else "GPUs", {run.machine.platform})
    split = run.evidence.workload.weights_split_over if run.evidence else None
    parts = [
        run.model,
        run.strategy or "",
        ran.layout_words(),
        f"weights split over {split}" if split is not None and split > 1 else "",
        TRAITS["routing"].label(run),
        f"{units.count(gpus)} {ranks}{on_nodes(run)} ({run.machine.accelerator or units.ABSENT})",
        ", ".join(filter(None, (run.engine, dtype_that_ran(run)))),
    ]
    return " · ".join(filter(None, parts))


def _block(run: RunRecord, metrics: RunMetrics | str | None, log: Path, group: Group | None, numbers: Mapping[int, int]) -> Lines:
    lines: Lines = []
    if run.outcome != "completed":
        lines += [("outcome", run.outcome.replace("_", " ")), ("cause", run.cause), ("try", run.hint), ("log", str(log))]
    lines += [("not counted", mismatch) for mismatch in run.mismatches]
    if isinstance(metrics, RunMetrics):
        each = [(numbers[id(item.result.run)], item.metrics) for item in group.runs if item.metrics] if group else []
        rows = [(f"run {number}", f"{STEP_TIME.in_full(one)}, {_rate(run, one)}") for number, one in each]
        return [*lines, *_measured(run, metrics, group or metrics), *rows]
    return [*lines, ("no speed", metrics if run.outcome == "completed" else None)]  # of another outcome, the cause says more


def _rate(run: RunRecord, of: RunMetrics | Group) -> str:
    return f"{TOKENS.in_full(of)} {per_rank(TOKENS.heading, {run.machine.platform})}"


def _measured(run: RunRecord, metrics: RunMetrics, of: RunMetrics | Group) -> Lines:
    """Describe a run, or a group by its first run and the numbers of all."""
    step, on_cpu, steps = STEP_TIME.in_full(of), run.machine.platform == "cpu", metrics.window.steps
    flops = FLOPS.in_full(of)
    several = f", n = {steps}" if of is metrics and steps > 1 and "(n = " not in step else ""
    lines: Lines = [
        ("median step", step + several),
        ("throughput", f"{TOKENS_OF_ALL.in_full(metrics)} tokens/s, " * (of is metrics) + _rate(run, of)),
        ("compute", None if on_cpu or flops == units.ABSENT else f"{flops}/GPU ({metrics.flops_convention})"),
        ("MFU", f"{units.ABSENT} ({absent})" if (absent := without_mfu(metrics)) else None),
    ]
    allocated = metrics.peak_memory_bytes is not None
    memory = catalogue.PEAK_MEMORY if allocated else catalogue.RESERVED_MEMORY
    also = f", {catalogue.RESERVED_MEMORY.in_full(of)} reserved" if allocated and metrics.peak_reserved_bytes else ""
    whose = f"{'allocated' if allocated else 'reserved'} on the worst rank{also}"
    for label, metric, context in (
        ("MFU", MFU, f"of {units.teraflops(metrics.peak_dense_flops)} dense"),
        ("of matmul", catalogue.MATMUL_SHARE, f"of the fastest {run.ran.matmul_dtype} product measured here"),
        ("peak memory", memory, "resident in the largest process" if on_cpu else whose),
        ("last loss", catalogue.LOSS, ""),
        ("cost", catalogue.COST, "per million tokens"),
        ("energy", catalogue.ENERGY, "J per token"),
        ("busiest expert", catalogue.EXPERT_LOAD, "the tokens of the mean expert of its layer"),
        ("busiest rank", catalogue.RANK_LOAD, "the mean rank's tokens; the others wait for it"),
        ("dropped", catalogue.DROPPED, "of the choices of experts"),
    ):
        if (value := metric.in_full(of)) != units.ABSENT:
            rate = f" ({MATMUL_RATE.in_full(of)})" if metric is catalogue.MATMUL_SHARE else ""
            lines.append((label, f"{value} {context}{rate}".rstrip()))
    notes = [*map(finding_words, metrics.warnings), *other_notes(run.evidence)]
    return [
        *lines,
        ("predicted", _predicted(run, metrics, of)),
        ("start", f"{units.seconds(max(run.start_up.values()))} before the first step" if run.start_up else None),
        ("steady steps", rule_words(metrics.window)),
        *(("note", note) for note in notes),
    ]


def _predicted(run: RunRecord, metrics: RunMetrics, of: RunMetrics | Group) -> str | None:
    prediction, parts = run.prediction, []
    if prediction is None:
        return None
    if drops_choices(run, metrics.dropped):
        return f"not compared: {units.gibibytes(prediction.allocated_bytes)} and the step were predicted without dropped choices"
    if metrics.predicted_step_error is not None:
        error = STEP_ERROR.in_full(of)
        parts.append(f"step {units.seconds(prediction.step_seconds)} ({error}), from {prediction.rates}")
    if metrics.predicted_memory_error is not None:
        need = prediction.allocated_bytes if metrics.peak_memory_bytes else prediction.reserved_bytes
        parts.append(f"memory {units.gibibytes(need)} ({MEMORY_ERROR.in_full(of)})")
    return "; ".join(parts) or None


def document(rows: Sequence[tuple[RunRecord, RunMetrics | None, Path | None, Path]]) -> dict[str, Any]:
    """Return the run, metrics, benchmark file and log of each run as data."""
    return {
        "runs": [
            {
                "run": as_document(run),
                "metrics": None if metrics is None else as_document(metrics),
                "benchmark_file": None if file is None else str(file),
                "log": str(log),
            }
            for run, metrics, file, log in rows
        ]
    }
