"""The summary of a call of ./benchmark.py, as text and as a JSON document."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tprimat import units
from tprimat.records.files import as_document
from tprimat.records.metrics import Estimate, RunMetrics
from tprimat.records.schema import RunRecord, StartUp

Row = tuple[RunRecord, RunMetrics | str | None, Path]
"""Run, its metrics or why there are none, and its log."""
STAGES: dict[StartUp, str] = {
    "rank_started": "until ranks run",
    "imported": "imports",
    "process_group": "process group",
    "model_built": "model",
    "training": "rest",
}
"""What the time before each stage of a start goes into."""


def summary(rows: Sequence[Row]) -> str:
    """One block a run: what ran, how fast, how sure, and what is to be said about it."""
    return "\n\n".join("\n".join(_block(*row)) for row in rows)


def _block(run: RunRecord, metrics: RunMetrics | str | None, log: Path) -> list[str]:
    gpus = run.machine.gpus
    ranks = ("process" if gpus == 1 else "processes") if run.machine.platform == "cpu" else "GPU" if gpus == 1 else "GPUs"
    lines = [
        f"{run.model} · {run.strategy} · TP={run.tensor_parallel} PP={run.pipeline_parallel} DP={run.data_parallel}"
        f" · {units.count(gpus)} {ranks} ({run.machine.accelerator or units.ABSENT}) · {run.engine}, {run.matmul_dtype}"
    ]
    if run.outcome != "completed":
        lines += _labelled("outcome", run.outcome.replace("_", " "))
        lines += _labelled("cause", run.cause) + _labelled("try", run.hint) + _labelled("log", str(log))
    if isinstance(metrics, RunMetrics):
        return lines + _measured(run, metrics)  # mismatches are among its notes
    if run.outcome == "completed":  # the cause of another outcome says more
        lines += _labelled("no speed", metrics)
    return lines + [line for mismatch in run.mismatches for line in _labelled("not counted", mismatch)]


def _measured(run: RunRecord, metrics: RunMetrics) -> list[str]:
    per_gpu, flops = metrics.tokens_per_second_per_gpu, metrics.model_flops_per_second_per_gpu
    on_cpu = run.machine.platform == "cpu"
    several = f", n = {metrics.window.steps}" if metrics.window.steps > 1 else ""
    lines = _labelled("step time", with_interval(metrics.step_seconds, units.seconds) + several)
    lines += _labelled("throughput", f"{units.count(metrics.tokens_per_second)} tokens/s")
    if not on_cpu:
        lines[-1] += f", {with_interval(per_gpu, units.count)} tokens/s/GPU"
        lines += _labelled("compute", f"{with_interval(flops, units.teraflops)}/GPU ({metrics.flops_convention})")
    if metrics.mfu is not None:
        lines += _labelled(
            "MFU", f"{with_interval(metrics.mfu, units.percent)} of {units.teraflops(metrics.peak_dense_flops)} dense"
        )
    elif metrics.mfu_absent_because:
        lines += _labelled("MFU", f"{units.ABSENT} ({metrics.mfu_absent_because})")
    if metrics.share_of_measured_gemm is not None:
        fastest = f"the fastest {run.matmul_dtype} product measured here ({units.si(metrics.measured_gemm_flops, 'FLOP/s')})"
        lines += _labelled("of matmul", f"{units.percent(metrics.share_of_measured_gemm)} of {fastest}")
    if metrics.peak_memory_bytes is not None:
        lines += _labelled("peak memory", f"{units.gibibytes(metrics.peak_memory_bytes)} allocated on the worst rank")
    if metrics.final_loss is not None:
        lines += _labelled("last loss", f"{metrics.final_loss:.4f}")
    if metrics.cost_per_million_tokens is not None:
        lines += _labelled("cost", f"{metrics.cost_per_million_tokens:.4g} per million tokens")
    if metrics.joules_per_token is not None:
        lines += _labelled("energy", f"{metrics.joules_per_token:.4g} J per token")
    lines += _labelled("start", _start(run)) + _labelled("steady steps", metrics.window.rule)
    notes = (*metrics.warnings, *(run.evidence.notes if run.evidence else ()))
    return lines + [line for note in notes for line in _labelled("note", note)]


def _start(run: RunRecord) -> str | None:
    """What passed before the first step, by stages."""
    parts, before = [], 0.0
    for stage, words in STAGES.items():
        reached = run.start_up.get(stage)
        if reached is not None:
            parts.append(f"{words} {units.seconds(reached - before)}")
            before = reached
    return f"{units.seconds(before)} before the first step: {', '.join(parts)}" if parts else None


def with_interval(estimate: Estimate | None, text: Any) -> str:
    """A number with its 95 % interval, or with the word that there is none."""
    if estimate is None:
        return units.ABSENT
    if estimate.low is None or estimate.high is None:
        return f"{text(estimate.value)} (n = 1)"
    return f"{text(estimate.value)} [{text(estimate.low)} .. {text(estimate.high)}]"


def _labelled(label: str, text: str | None) -> list[str]:
    return [f"  {label:<13} {text}"] if text else []


def document(rows: Sequence[tuple[RunRecord, RunMetrics | None, Path | None, Path]]) -> dict[str, Any]:
    """The same as data: run, metrics, benchmark file and log of each run."""
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
