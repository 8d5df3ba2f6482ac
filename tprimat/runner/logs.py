"""Logs of frameworks that write no records: followed while they run, and turned into a benchmark file afterwards."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from tprimat.analyze.impossible import contradictions
from tprimat.analyze.metrics import run_metrics
from tprimat.config.load import load_config
from tprimat.core.errors import MetricError, RecordError
from tprimat.logs.contents import Attempts, Claims
from tprimat.logs.fields import LineFields
from tprimat.logs.read import Run, UnrecordedError, parsed_log, read_log, step_record
from tprimat.logs.times import seconds_of
from tprimat.plan.build import shape_of
from tprimat.plan.schema import RunPlan, mismatches, unproven
from tprimat.records.benchmark_file import RunResult, benchmark_file_name, write_benchmark_file
from tprimat.records.discover import read_result
from tprimat.records.schema import RunMetrics, RunRecord, StepRecord
from tprimat.report.summary import summary
from tprimat.report.tables import screen_of
from tprimat.report.words import finding_words

SLACK_SECONDS, SLACK_SHARE = 0.2, 0.02
"""How far steps may be from the time between their lines: the launcher reads ten times a second, and power once."""


class FollowedLog:
    """Read steps and evidence of a framework that writes no records from its log: `step_of_line` and `complete` of a Launch.

    Each step is reported once, with its line. What only the whole log shows (the mean that Megatron prints for its second step,
    peaks that come later) is corrected at the end, in steps.jsonl too.
    """

    def __init__(self, plan: RunPlan, read_line: Callable[[str], LineFields | None], started_at: str | None = None) -> None:
        self._plan = plan
        self._read_line = read_line
        self._began = None if started_at is None else datetime.fromisoformat(started_at)
        self._came: dict[int, float] = {}
        """Step -> when its line came, in seconds since the run's start; of the last attempt."""
        self._attempts = Attempts()
        self._lines = 0
        self._reported: set[int] = set()
        batch = plan.workload
        self._claims = Claims(
            gpus=plan.nodes * plan.gpus_per_node,
            global_batch_sequences=batch.global_batch_sequences,
            sequence_tokens=batch.sequence_tokens,
        )

    def step_of_line(self, text: str) -> StepRecord | None:
        """Return the step that a line reports for the first time."""
        self._lines += 1
        fields = self._read_line(text)
        if fields is None:
            return None
        attempts = len(self._attempts.former)
        self._attempts.add(fields, self._lines)
        if len(self._attempts.former) > attempts:
            self._came.clear()
        step = self._attempts.latest.steps.get(fields.step) if fields.step is not None else None
        if step is None or step.step in self._reported:
            return None
        seconds = seconds_of(step, self._claims)
        if seconds is None:
            return None
        self._reported.add(step.step)
        if self._began is not None:
            self._came[step.step] = (datetime.now(timezone.utc) - self._began).total_seconds()
        return step_record(step, seconds, self._claims)

    def complete(self, run: RunRecord) -> tuple[RunRecord, tuple[StepRecord, ...]]:
        """Return the last record, with the log's evidence and where it contradicts the plan, and the steps of the whole log."""
        steps, evidence, notes = parsed_log(self._attempts.measured, self._claims)
        evidence = dataclasses.replace(evidence, notes=(*evidence.notes, *notes))
        findings = mismatches(self._plan, evidence)
        if steps:  # what a run that failed before its first step did not prove is no news
            findings += unproven(self._plan, evidence)
        completed = dataclasses.replace(run, clock="framework", evidence=evidence, mismatches=findings)
        return completed, with_moments(steps, self._came)


def with_moments(steps: Sequence[StepRecord], came: Mapping[int, float]) -> tuple[StepRecord, ...]:
    """Say of the last steps when they ended: when their lines came, in seconds from the run's start.

    Where the steps do not add up to the time between their lines, because a log leaves out validation, checkpoints or steps,
    those before keep no moment.
    """
    timed = list(steps)
    summed = 0.0
    for place in reversed(range(len(timed))):
        step = timed[place]
        at, end = came.get(step.step), came.get(timed[-1].step)
        if at is None or end is None or abs(end - at - summed) > SLACK_SECONDS + SLACK_SHARE * summed:
            break
        timed[place] = dataclasses.replace(step, ended_at_seconds=round(at, 3))
        summed += step.step_seconds
    kept = [step.ended_at_seconds for step in timed if step.ended_at_seconds is not None]
    # Between lines that are closer, the slack would make steps contradict their moments.
    return tuple(timed) if kept and kept[-1] - kept[0] >= 10 * SLACK_SECONDS else tuple(steps)


def extract_log(path: str, claims: Claims, *, output: Path | None = None) -> int:
    """Read a log, write its benchmark file, and print the result; return 1 where the run failed or measured no step, else 0."""
    shapes = {name: shape_of(model, "full") for name, model in load_config().models.items()}
    try:
        run = read_log(path, claims, known_models=shapes)
    except UnrecordedError as error:
        print(f"{error.failure.outcome.replace('_', ' ')}: {error.failure.cause}", file=sys.stderr)
        if error.failure.hint:
            print(f"  try   {error.failure.hint}", file=sys.stderr)
        print(f"no record: {error}", file=sys.stderr)
        return 2 if error.failure.outcome == "interrupted" else 1
    written, metrics = save(run, path, output)
    record, measured = run.record, metrics if isinstance(metrics, RunMetrics) else None
    said = record.evidence.notes if record.evidence and measured else ()  # the summary has them
    for note in (note for note in run.notes if note not in said):
        print(f"note: {note}", file=sys.stderr)
    if measured is not None and measured.tokens_per_second is None:
        print("note: the tokens of a step are not known: --global-batch-size, --sequence-length", file=sys.stderr)
    elif measured is not None and measured.tokens_per_second_per_gpu is None:
        print("note: the number of GPUs is not known: --num-gpus", file=sys.stderr)
    wrong = map(finding_words, contradictions(RunResult(run=record, steps=run.steps, path=Path()), measured))
    print(summary([(replace(record, mismatches=(*record.mismatches, *wrong)), metrics, Path(path))], screen_of(sys.stdout)))
    kept = f"kept: {written}, which the run itself wrote" if written_by(written, record) else f"written: {written}"
    print(kept, file=sys.stderr)
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
