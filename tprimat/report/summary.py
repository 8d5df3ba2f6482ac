"""Summarize the runs of one ./benchmark.py call, as text and as a JSON document."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tprimat.analyze.metrics import drops_choices
from tprimat.analyze.traits import dtype_that_ran, on_nodes, routing_words
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


def summary(rows: Sequence[Row], screen: Screen = PLAIN, *, brief: bool = False) -> str:
    """Format one block per run: what ran, how fast, with which uncertainty, and notes.

    Brief, for a call of several runs, whose notes follow once: without the quiet lines of the runs that count.
    """
    blocks = []
    for run, metrics, log in rows:
        lines = [screen.prose(_heading(run), 2)]
        for label, text in _block(run, metrics, log):
            if text and not (brief and run.counts and label in QUIET):
                lines.append(screen.prose(f"  {label:<{VALUES - 3}} {text}", VALUES))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _heading(run: RunRecord) -> str:
    gpus, ran = run.machine.gpus, run.ran
    ranks = per_rank("GPU" if gpus == 1 else "GPUs", {run.machine.platform})
    experts = f" EP={ran.expert_parallel}" if ran.expert_parallel not in {None, 1} else ""
    split = run.evidence.workload.weights_split_over if run.evidence else None
    degrees = (("TP", ran.tensor_parallel), ("PP", ran.pipeline_parallel), ("DP", ran.data_parallel))
    parts = [
        run.model,
        run.strategy or "",
        " ".join(f"{name}={degree}" for name, degree in degrees if degree is not None) + experts,
        f"weights split over {split}" if split is not None and split > 1 else "",
        routing_words(run),
        f"{units.count(gpus)} {ranks}{on_nodes(run)} ({run.machine.accelerator or units.ABSENT})",
        ", ".join(filter(None, (run.engine, dtype_that_ran(run)))),
    ]
    return " · ".join(filter(None, parts))


def _block(run: RunRecord, metrics: RunMetrics | str | None, log: Path) -> Lines:
    lines: Lines = []
    if run.outcome != "completed":
        lines += [("outcome", run.outcome.replace("_", " ")), ("cause", run.cause), ("try", run.hint), ("log", str(log))]
    lines += [("not counted", mismatch) for mismatch in run.mismatches]
    if isinstance(metrics, RunMetrics):
        return lines + _measured(run, metrics)
    return [*lines, ("no speed", metrics if run.outcome == "completed" else None)]  # of another outcome, the cause says more


def _measured(run: RunRecord, metrics: RunMetrics) -> Lines:
    step, on_cpu = STEP_TIME.in_full(metrics), run.machine.platform == "cpu"
    several = f", n = {metrics.window.steps}" if metrics.window.steps > 1 and "(n = " not in step else ""
    per_gpu = f"{TOKENS.in_full(metrics)} {per_rank(TOKENS.heading, {run.machine.platform})}"
    lines: Lines = [
        ("median step", step + several),
        ("throughput", f"{TOKENS_OF_ALL.in_full(metrics)} tokens/s, {per_gpu}"),
        ("compute", None if on_cpu else f"{FLOPS.in_full(metrics)}/GPU ({metrics.flops_convention})"),
        ("MFU", f"{units.ABSENT} ({absent})" if (absent := without_mfu(metrics)) else None),
    ]
    allocated = metrics.peak_memory_bytes is not None
    memory = catalogue.PEAK_MEMORY if allocated else catalogue.RESERVED_MEMORY
    also = f", {catalogue.RESERVED_MEMORY.in_full(metrics)} reserved" if allocated and metrics.peak_reserved_bytes else ""
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
        if metric.of_run(metrics) is not None:
            rate = f" ({MATMUL_RATE.in_full(metrics)})" if metric is catalogue.MATMUL_SHARE else ""
            lines.append((label, f"{metric.in_full(metrics)} {context}{rate}".rstrip()))
    notes = [*map(finding_words, metrics.warnings), *other_notes(run.evidence)]
    return [
        *lines,
        ("predicted", _predicted(run, metrics)),
        ("start", f"{units.seconds(max(run.start_up.values()))} before the first step" if run.start_up else None),
        ("steady steps", rule_words(metrics.window)),
        *(("note", note) for note in notes),
    ]


def _predicted(run: RunRecord, metrics: RunMetrics) -> str | None:
    prediction, parts = run.prediction, []
    if prediction is None:
        return None
    if drops_choices(run, metrics.dropped):
        return f"not compared: {units.gibibytes(prediction.allocated_bytes)} and the step were predicted without dropped choices"
    if metrics.predicted_step_error is not None:
        error = STEP_ERROR.in_full(metrics)
        parts.append(f"step {units.seconds(prediction.step_seconds)} ({error}), from {prediction.rates}")
    if metrics.predicted_memory_error is not None:
        need = prediction.allocated_bytes if metrics.peak_memory_bytes else prediction.reserved_bytes
        parts.append(f"memory {units.gibibytes(need)} ({MEMORY_ERROR.in_full(metrics)})")
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
