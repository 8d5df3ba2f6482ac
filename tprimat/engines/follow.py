"""Read steps and evidence of a running framework from its log, for frameworks that write no records."""

import dataclasses
from collections.abc import Callable

from tprimat.logs.extract import parsed_log, step_record
from tprimat.logs.fields import LineFields
from tprimat.logs.steps import LogContents, Workload, seconds_of
from tprimat.plan.evidence import mismatches, unproven
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import RunRecord, StepRecord


class FollowedLog:
    """Provide `step_of_line` and `complete` to a Launch.

    Each step is reported once, with its line. What only the whole log shows (the mean that Megatron prints for its second step,
    peaks that come later) is corrected at the end, in steps.jsonl too.
    """

    def __init__(self, plan: RunPlan, read_line: Callable[[str], LineFields | None]) -> None:
        self._plan = plan
        self._read_line = read_line
        self._contents = LogContents()
        self._lines = 0
        self._reported: set[int] = set()
        batch = plan.batch
        self._workload = Workload(
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
        self._contents.add(fields, self._lines)
        step = self._contents.steps.get(fields.step) if fields.step is not None else None
        if step is None or step.step in self._reported:
            return None
        seconds = seconds_of(step, self._workload)
        if seconds is None:
            return None
        self._reported.add(step.step)
        return step_record(step, seconds, self._workload)

    def complete(self, run: RunRecord) -> tuple[RunRecord, tuple[StepRecord, ...]]:
        """Return the last record, with the log's evidence and where it contradicts the plan, and the steps of the whole log."""
        parsed = parsed_log(self._contents, self._workload)
        evidence = dataclasses.replace(parsed.evidence, notes=(*parsed.evidence.notes, *parsed.notes))
        findings = mismatches(self._plan, evidence)
        if parsed.steps:  # what a run that failed before its first step did not prove is no news
            findings += unproven(self._plan, evidence)
        completed = dataclasses.replace(run, clock="framework", evidence=evidence, mismatches=findings)
        return completed, parsed.steps
