"""Fine-tuning runs of the suite, from their records."""

from collections.abc import Sequence

from tprimat import units
from tprimat.analyze.metrics import run_metrics
from tprimat.record.benchmark_file import RunResult
from tprimat.record.schema import RunRecord, StepRecord
from tprimat.report.markdown import table

HEADER = ("run", "engine", "dtype", "devices", "tokens/s of one", "tokens/s in all", "memory of each", "steps")


def finetune_table(runs: Sequence[tuple[str, RunResult]]) -> str | None:
    """Throughput and memory of completed runs, each under its name; None where there are none."""
    rows = [row_of(name, result.run, result.steps) for name, result in runs if result.run.counts and result.steps]
    return table(HEADER, rows, left=3) if rows else None


def row_of(name: str, run: RunRecord, steps: Sequence[StepRecord]) -> list[str]:
    """One run."""
    metrics = run_metrics(run, steps)
    each = metrics.tokens_per_second_per_gpu
    return [
        name.removeprefix("benchmark_"),
        run.engine,
        run.matmul_dtype or units.ABSENT,
        units.count(run.machine.gpus),
        units.count(each.value if each else None),
        units.count(metrics.tokens_per_second),
        units.gibibytes(metrics.peak_memory_bytes),
        units.count(metrics.window.steps),
    ]
