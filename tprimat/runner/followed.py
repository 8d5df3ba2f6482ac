"""Follow a framework that writes no records: steps and evidence come from its log."""

import dataclasses
from collections.abc import Callable

from tprimat.logs.claims import Claims
from tprimat.logs.contents import Attempts
from tprimat.logs.fields import LineFields
from tprimat.logs.read import parsed_log, step_record
from tprimat.logs.times import seconds_of
from tprimat.plan.evidence import mismatches, unproven
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import RunRecord, StepRecord


class FollowedLog:
    """Read steps and evidence of a framework that writes no records from its log: `step_of_line` and `complete` of a Launch.

    Each step is reported once, with its line. What only the whole log shows (the mean that Megatron prints for its second step,
    peaks that come later) is corrected at the end, in steps.jsonl too.
    """

    def __init__(self, plan: RunPlan, read_line: Callable[[str], LineFields | None]) -> None:
        self._plan = plan
        self._read_line = read_line
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
        self._attempts.add(fields, self._lines)
        step = self._attempts.latest.steps.get(fields.step) if fields.step is not None else None
        if step is None or step.step in self._reported:
            return None
        seconds = seconds_of(step, self._claims)
        if seconds is None:
            return None
        self._reported.add(step.step)
        return step_record(step, seconds, self._claims)

    def complete(self, run: RunRecord) -> tuple[RunRecord, tuple[StepRecord, ...]]:
        """Return the last record, with the log's evidence and where it contradicts the plan, and the steps of the whole log."""
        steps, evidence, notes = parsed_log(self._attempts.measured, self._claims)
        evidence = dataclasses.replace(evidence, notes=(*evidence.notes, *notes))
        findings = mismatches(self._plan, evidence)
        if steps:  # what a run that failed before its first step did not prove is no news
            findings += unproven(self._plan, evidence)
        completed = dataclasses.replace(run, clock="framework", evidence=evidence, mismatches=findings)
        return completed, steps
