"""Turn a training log into a benchmark file, also while the log still grows."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tprimat.analyze.impossible import contradictions
from tprimat.analyze.metrics import run_metrics
from tprimat.analyze.traits import routing_words
from tprimat.config.load import load_config
from tprimat.core import units
from tprimat.core.errors import ConfigError, MetricError, RecordError
from tprimat.logs.claims import Flags, unknown_model
from tprimat.logs.extract import ExtractedRun, extract, failure_before_first_step
from tprimat.logs.parse import LogLines, LogReading
from tprimat.records.benchmark_file import RunResult, benchmark_file_name, write_benchmark_file
from tprimat.records.discover import read_result
from tprimat.records.evidence import CAUTION
from tprimat.records.schema import LogSource, RunMetrics, RunRecord
from tprimat.report.catalogue import per_rank
from tprimat.report.tables import plural

REWRITE_SECONDS = 1.0
"""Least time between two rewrites of the file while a log grows."""
REWRITE_SHARE = 3
"""And at least this many times as long as the last rewrite took, so that writing takes at most a quarter of the time."""


def extract_log(log: LogLines, flags: Flags, *, dialect: str = "auto", output: Path | None = None) -> int:
    """Read a log to its end, write its benchmark file (by default next to the log), print the result.

    A log that is followed is written out again and again as it grows; Ctrl-C ends it.

    Returns:
        The exit status: 0, or 1 where the log shows that the run failed or measured no step.

    Raises:
        ConfigError: a flag contradicts the log, or neither states something that is needed.
        RecordError: the log cannot be read or is not that of a training run, or the file cannot be written.
    """
    reading = LogReading(name=log.name, requested_dialect=dialect)
    try:
        _read(log, reading, flags, output)
    except KeyboardInterrupt:
        print("stopped; what was read so far is kept", file=sys.stderr)
    except RecordError as error:
        raise unknown_model(flags, load_config()) or error from None
    if log.why_truncated:
        print(f"note: {log.name} is damaged: {log.why_truncated}", file=sys.stderr)
    try:
        extracted = extracted_run(log, reading, flags, growing=False)
    except ConfigError as error:
        if (failure := failure_before_first_step(reading)) is None:
            raise
        print(f"{failure.outcome.replace('_', ' ')}: {failure.cause}", file=sys.stderr)
        print(f"no record: {error}", file=sys.stderr)
        return 1
    path, metrics = save(extracted, log, output)
    _print_remarks(extracted, metrics)
    print("\n".join(summary(extracted, metrics, path)))
    return 0 if extracted.run.outcome in {"completed", "interrupted"} else 1


def _read(log: LogLines, reading: LogReading, flags: Flags, output: Path | None) -> None:
    due, saved_steps = time.monotonic() + REWRITE_SECONDS, 0
    for batch in log.batches():
        reading.add(batch)
        log.stop = reading.contents.finished
        steps = len(reading.contents.steps)
        if log.follow and steps > saved_steps and time.monotonic() >= due:
            started, saved_steps = time.monotonic(), steps
            save(extracted_run(log, reading, flags, growing=True), log, output)
            due = time.monotonic() + max(REWRITE_SECONDS, REWRITE_SHARE * (time.monotonic() - started))


def extracted_run(log: LogLines, reading: LogReading, flags: Flags, *, growing: bool) -> ExtractedRun:
    """Return the record of the lines read so far."""
    source = LogSource(path=log.name, sha256=log.sha256, truncated=log.truncated)
    return extract(reading, flags, source, load_config(), growing=growing)


def save(extracted: ExtractedRun, log: LogLines, output: Path | None) -> tuple[Path, RunMetrics | None]:
    """Write the benchmark file; return its path and the metrics, None where no steady step was measured.

    A file that the run itself wrote next to its log stays as it is: it holds more than the log.
    """
    folder = Path() if log.path == "-" else Path(log.path).parent
    path = output or folder / benchmark_file_name(extracted.run)
    try:
        metrics = run_metrics(extracted.run, extracted.steps)
    except MetricError as error:
        print(f"no metrics: {error}", file=sys.stderr)
        metrics = None
    if output is not None or not written_by(path, extracted.run):
        write_benchmark_file(path, extracted.run, extracted.steps, metrics)
    return path, metrics


def written_by(path: Path, run: RunRecord) -> bool:
    """Return whether a benchmark file was written by the run itself, not from its log."""
    try:
        found = read_result(path).run
    except RecordError:
        return False
    return found.run_id == run.run_id and found.source is None


def _print_remarks(extracted: ExtractedRun, metrics: RunMetrics | None) -> None:
    run = extracted.run
    for note in extracted.notes:
        print(f"note: {note}", file=sys.stderr)
    if run.cause:
        print(f"{run.outcome.replace('_', ' ')}: {run.cause}", file=sys.stderr)
    if run.hint:
        print(f"try: {run.hint}", file=sys.stderr)
    reasons = contradictions(RunResult(run=run, steps=extracted.steps, path=Path()), metrics)
    for reason in reasons:
        print(f"warning: this will not count: {reason}", file=sys.stderr)
    for warning in metrics.warnings if metrics is not None else ():
        if warning not in reasons and CAUTION + warning not in extracted.notes:
            print(f"note: {warning}", file=sys.stderr)
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
    return f"{units.percent(metrics.mfu.value)} of the dense {run.matmul_dtype} peak, {units.teraflops(metrics.peak_dense_flops)}"


def summary(extracted: ExtractedRun, metrics: RunMetrics | None, path: Path) -> Sequence[str]:
    """Return the lines that describe the result."""
    run, machine = extracted.run, extracted.run.machine
    rate = metrics.tokens_per_second_per_gpu if metrics else None
    time_text = f"{units.seconds(metrics.step_seconds.value)} median of {metrics.window.steps}" if metrics else units.ABSENT
    work = f"{units.count(run.global_batch_sequences)} sequences of {units.count(run.sequence_tokens)}"
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
