"""Turn a training log into a benchmark file."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tprimat.analyze.impossible import contradictions
from tprimat.analyze.metrics import run_metrics
from tprimat.analyze.traits import routing_words
from tprimat.config.load import load_config
from tprimat.core import units
from tprimat.core.errors import MetricError, RecordError
from tprimat.logs.claims import Claims
from tprimat.logs.read import FailedBeforeStepOneError, Run, read_log
from tprimat.plan.build import shape_of
from tprimat.records.benchmark_file import RunResult, benchmark_file_name, write_benchmark_file
from tprimat.records.discover import read_result
from tprimat.records.schema import RunMetrics, RunRecord
from tprimat.report.catalogue import per_rank
from tprimat.report.tables import plural
from tprimat.report.words import finding_words


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
    except FailedBeforeStepOneError as error:
        print(f"{error.failure.outcome.replace('_', ' ')}: {error.failure.cause}", file=sys.stderr)
        print(f"no record: {error}", file=sys.stderr)
        return 1
    written, metrics = save(run, path, output)
    _print_remarks(run, metrics)
    print("\n".join(summary(run, metrics, written)))
    return 0 if run.record.outcome in {"completed", "interrupted"} else 1


def save(run: Run, log: str, output: Path | None) -> tuple[Path, RunMetrics | None]:
    """Write the benchmark file; return its path and the metrics, None where no steady step was measured.

    A file that the run itself wrote next to its log stays as it is: it holds more than the log.
    """
    path = output or (Path() if log == "-" else Path(log).parent) / benchmark_file_name(run.record)
    try:
        metrics = run_metrics(run.record, run.steps)
    except MetricError as error:
        print(f"no metrics: {error}", file=sys.stderr)
        metrics = None
    if output is not None or not written_by(path, run.record):
        write_benchmark_file(path, run.record, run.steps, metrics)
    return path, metrics


def written_by(path: Path, run: RunRecord) -> bool:
    """Return whether a benchmark file was written by the run itself, not from its log."""
    try:
        written = read_result(path).run
    except RecordError:
        return False
    return written.run_id == run.run_id and written.source is None


def _print_remarks(extracted: Run, metrics: RunMetrics | None) -> None:
    run = extracted.record
    for note in extracted.notes:
        print(f"note: {note}", file=sys.stderr)
    if run.cause:
        print(f"{run.outcome.replace('_', ' ')}: {run.cause}", file=sys.stderr)
    if run.hint:
        print(f"try: {run.hint}", file=sys.stderr)
    for reason in contradictions(RunResult(run=run, steps=extracted.steps, path=Path()), metrics):
        print(f"warning: this will not count: {reason}", file=sys.stderr)
    for finding in metrics.warnings if metrics is not None else ():
        if finding.kind != "caution":  # those are among the notes of the log
            print(f"note: {finding_words(finding)}", file=sys.stderr)
    if metrics is not None and metrics.tokens_per_second is None:
        print(
            "note: no throughput, since the tokens of a step are not known: --global-batch-size, --sequence-length",
            file=sys.stderr,
        )
    if metrics is not None and metrics.mfu_absent_because:
        way_out = " (--gpu names it)" if run.machine.accelerator is None and run.machine.platform != "cpu" else ""
        print(f"note: no MFU, since {metrics.mfu_absent_because}{way_out}", file=sys.stderr)


def _mfu(run: RunRecord, metrics: RunMetrics | None) -> str:
    """Return MFU with the peak that it is a share of."""
    if metrics is None or metrics.mfu is None:
        return units.ABSENT
    dtype = run.ran.matmul_dtype
    return f"{units.percent(metrics.mfu.value)} of the dense {dtype} peak, {units.teraflops(metrics.peak_dense_flops)}"


def summary(extracted: Run, metrics: RunMetrics | None, path: Path) -> Sequence[str]:
    """Return the lines that describe the result."""
    run, machine = extracted.record, extracted.record.machine
    rate = metrics.tokens_per_second_per_gpu if metrics else None
    time_text = f"{units.seconds(metrics.step_seconds.value)} median of {metrics.window.steps}" if metrics else units.ABSENT
    work = f"{units.count(run.ran.global_batch_sequences)} sequences of {units.count(run.ran.sequence_tokens)}"
    rows = (
        ("log", f"{run.engine}, {plural(len(extracted.steps), 'step')}, {run.outcome.replace('_', ' ')}"),
        ("machine", f"{units.count(machine.gpus)} x {machine.accelerator or 'unknown accelerator'} ({machine.platform})"),
        ("workload", ", ".join(filter(None, (f"{work} tokens a step", routing_words(run))))),
        ("step time", time_text),
        ("throughput", per_rank(f"{units.count(rate.value)} tokens/s/GPU", [machine.platform]) if rate else units.ABSENT),
        ("MFU", _mfu(run, metrics)),
        ("kept", f"{path}, which the run itself wrote") if written_by(path, run) else ("written", str(path)),
    )
    return [f"{label:<11} {value}" for label, value in rows]
