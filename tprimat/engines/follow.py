"""Steps and evidence of a framework that writes neither, from its log while it runs."""

import dataclasses
from collections.abc import Callable

from tprimat.logs.extract import parsed_log, step_record
from tprimat.logs.fields import LineFields
from tprimat.logs.steps import LogContents, Workload, seconds_of
from tprimat.plan.evidence import mismatches, unproven
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import RunRecord, StepRecord


class FollowedLog:
    """Give `step_of_line` and `complete` to a Launch.

    A step is told, and kept, with its line. What only the whole log tells (the mean that Megatron prints for its second step,
    peaks that come later) is mended in the end, in steps.jsonl as well.
    """

    def __init__(self, plan: RunPlan, read_line: Callable[[str], LineFields | None]) -> None:
        self._plan = plan
        self._read_line = read_line
        self._contents = LogContents()
        self._lines = 0
        self._told: set[int] = set()
        batch = plan.batch
        self._workload = Workload(
            gpus=plan.nodes * plan.gpus_per_node,
            global_batch_sequences=batch.global_batch_sequences,
            sequence_tokens=batch.sequence_tokens,
        )

    def step_of_line(self, text: str) -> StepRecord | None:
        """The step that a line tells for the first time."""
        self._lines += 1
        fields = self._read_line(text)
        if fields is None:
            return None
        self._contents.add(fields, self._lines)
        step = self._contents.steps.get(fields.step) if fields.step is not None else None
        if step is None or step.step in self._told:
            return None
        seconds = seconds_of(step, self._workload)
        if seconds is None:
            return None
        self._told.add(step.step)
        return step_record(step, seconds, self._workload)

    def complete(self, run: RunRecord) -> tuple[RunRecord, tuple[StepRecord, ...]]:
        """The last record, with what the log proves and where it contradicts the plan; the steps as the whole log tells them."""
        parsed = parsed_log(self._contents, self._workload)
        evidence = dataclasses.replace(parsed.evidence, notes=(*parsed.evidence.notes, *parsed.notes))
        doubts = mismatches(self._plan, evidence)
        if parsed.steps:  # a run that failed before its first step has more to say than what it did not prove
            doubts += unproven(self._plan, evidence)
        told = dataclasses.replace(run, clock="framework", evidence=evidence, mismatches=doubts)
        return told, parsed.steps
