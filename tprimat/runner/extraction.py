"""Turn a training log into a benchmark file."""

import sys
from dataclasses import replace
from pathlib import Path

from tprimat.analyze.impossible import contradictions
from tprimat.analyze.metrics import run_metrics
from tprimat.config.load import load_config
from tprimat.core.errors import MetricError, RecordError
from tprimat.logs.contents import Claims
from tprimat.logs.read import Run, UnrecordedError, read_log
from tprimat.plan.build import shape_of
from tprimat.records.benchmark_file import RunResult, benchmark_file_name, write_benchmark_file
from tprimat.records.discover import read_result
from tprimat.records.schema import RunMetrics, RunRecord
from tprimat.report.summary import summary
from tprimat.report.tables import screen_of


def extract_log(path: str, claims: Claims, *, output: Path | None = None) -> int:
    """Read a log, write its benchmark file (by default next to the log), print the result.

    Returns:
        The exit status: 0, or 1 where the log shows that the run failed or measured no step.

    Raises:
        ConfigError: a flag contradicts the log, or neither states something that is needed.
        RecordError: the log cannot be read or is not that of a training run, or the file cannot be written.
    """
    shapes = {name: shape_of(model, "full") for name, model in load_config().models.items()}
    try:
        run = read_log(path, claims, known_models=shapes)
    except UnrecordedError as error:
        print(f"{error.failure.outcome.replace('_', ' ')}: {error.failure.cause}", file=sys.stderr)
        print(f"no record: {error}", file=sys.stderr)
        return 2 if error.failure.outcome == "interrupted" else 1
    written, metrics = save(run, path, output)
    record, measured = run.record, metrics if isinstance(metrics, RunMetrics) else None
    said = record.evidence.notes if record.evidence and measured else ()  # the summary has them
    for note in (note for note in run.notes if note not in said):
        print(f"note: {note}", file=sys.stderr)
    if measured is not None and measured.tokens_per_second is None:
        print("note: the tokens of a step are not known: --global-batch-size, --sequence-length", file=sys.stderr)
    wrong = contradictions(RunResult(run=record, steps=run.steps, path=Path()), measured)
    print(summary([(replace(record, mismatches=(*record.mismatches, *wrong)), metrics, Path(path))], screen_of(sys.stdout)))
    print(
        f"kept: {written}, which the run itself wrote" if written_by(written, record) else f"written: {written}", file=sys.stderr
    )
    return 0 if run.steps and record.outcome in {"completed", "interrupted"} else 1


def save(run: Run, log: str, output: Path | None) -> tuple[Path, RunMetrics | str]:
    """Write the benchmark file; return its path and the metrics, or why there are none.

    A file that the run itself wrote next to its log stays as it is: it holds more than the log.
    """
    path = output or (Path() if log == "-" else Path(log).parent) / benchmark_file_name(run.record)
    metrics: RunMetrics | str
    try:
        metrics = run_metrics(run.record, run.steps)
    except MetricError as error:
        metrics = str(error)
    if output is not None or not written_by(path, run.record):
        write_benchmark_file(path, run.record, run.steps, metrics if isinstance(metrics, RunMetrics) else None)
    return path, metrics


def written_by(path: Path, run: RunRecord) -> bool:
    """Return whether a benchmark file was written by the run itself, not from its log."""
    try:
        written = read_result(path).run
    except RecordError:
        return False
    return written.run_id == run.run_id and written.source is None
