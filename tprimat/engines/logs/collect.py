"""The fields of a log's lines, gathered by step as they come: doubled lines once, later lines of a step added to it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from tprimat.engines.base import LineFields
from tprimat.engines.logs.logged import LARGEST, LOGGED_ROW, LoggedStep, larger, logged_step
from tprimat.record.table import Rows, Table

OPEN_STEPS = 8192
"""So many of the latest steps are objects, since what lines say of a step comes close together. Older ones are rows."""


def measures(said: LineFields) -> bool:
    """Whether a line with a step tells how the step went, unlike a memory report."""
    values = (said.step_seconds, said.loss, said.tokens_per_second_per_gpu, said.sequences_per_second)
    return any(value is not None for value in values)


@dataclass(slots=True)
class Collection:
    """Everything that a log said so far."""

    steps: dict[int, LoggedStep] = field(default_factory=dict)
    """The latest, in the order of the log, which is ascending."""
    rows: Table = field(default_factory=lambda: Table(LOGGED_ROW))
    """All before them."""
    first_line: int | None = None
    """Of the first step, in the log, from 1."""
    evidence: dict[str, Any] = field(default_factory=dict)
    evidence_line: dict[str, int] = field(default_factory=dict)
    total_steps: int | None = None
    finished: bool = False
    accelerator: str | None = None
    device_used_bytes: int | None = None
    restarts: int = 0
    """How often the step number went back."""
    _reports: dict[int, LineFields] = field(default_factory=dict)
    _current: LoggedStep | None = None

    def __len__(self) -> int:
        return len(self.rows) + len(self.steps)

    @property
    def newest(self) -> int:
        """Number of the last step; 0 before the first."""
        return self._current.step if self._current is not None else 0

    def blocks(self) -> Iterator[Rows]:
        """All steps as rows."""
        yield from self.rows.blocks()
        if self.steps:
            yield _as_rows(self.steps.values())

    def first(self, count: int) -> list[LoggedStep]:
        """The first steps."""
        early = (logged_step(row) for block in self.rows.blocks() for row in block)
        return [*islice(early, count), *islice(self.steps.values(), count)][:count]

    def add(self, said: LineFields, line: int) -> None:
        """Take in what one line says."""
        for name, value in said.evidence.items():
            self._learn(name, value, line)
        self.total_steps = said.total_steps or self.total_steps
        self.finished = self.finished or said.finished
        if said.accelerator and said.accelerator != self.accelerator:
            self.accelerator, self.evidence_line["accelerator"] = said.accelerator, line
        self.device_used_bytes = larger(self.device_used_bytes, said.device_used_bytes)
        if said.global_batch_sequences is not None:
            self._learn("global_batch_sequences", said.global_batch_sequences, line)
        if said.step is not None:
            if abs(said.step) < LARGEST:
                self._add_step(said, said.step, line)
        elif self._current is not None:
            self._current.add(said)

    def add_rows(self, rows: Rows) -> None:
        """Take in steps that are newer than all before, each said by one line and not to be added to."""
        self._seal(len(self.steps))
        self.rows.append(rows)
        self._current = logged_step(rows[-1])

    def _learn(self, name: str, value: Any, line: int) -> None:
        """The last word counts: frameworks print what was asked first and what they run later. But fp8 runs on top of bf16."""
        if name == "matmul_dtype" and self.evidence.get(name) == "fp8":
            return
        if self.evidence.get(name) != value:
            self.evidence[name] = value
            self.evidence_line[name] = line

    def _add_step(self, said: LineFields, step: int, line: int) -> None:
        place, known = None, self.steps.get(step)
        if known is None and step <= self.newest and (place := self._place(step)) is not None:
            known = logged_step(self.rows.row(place)[0])
        if known is not None and (not measures(said) or known.repeats(said) or known.seconds is None):
            known.add(said)
            if place is not None and (row := _as_rows([known])).tobytes() != self.rows.row(place).tobytes():
                self.rows.replace(place, row)
        elif not measures(said) and has_peak_or_rate(said):
            self._reports[step] = said
        else:
            self._open(said, step, line)

    def _place(self, step: int) -> int | None:
        """Of a step among the rows."""
        place = self.rows.search("step", step)
        return place if place < len(self.rows) and self.rows.row(place)["step"][0] == step else None

    def _open(self, said: LineFields, step: int, line: int) -> None:
        if len(self) and step <= self.newest:
            self._go_back(step)
        if not len(self):
            self.first_line = line
        self._current = LoggedStep(step=step)
        self._current.add(said)
        if report := self._reports.pop(step, None):
            self._current.add(report)
        self.steps[step] = self._current
        if len(self.steps) >= 2 * OPEN_STEPS:
            self._seal(OPEN_STEPS)

    def _seal(self, count: int) -> None:
        numbers = list(islice(self.steps, count))
        if numbers:
            self.rows.append(_as_rows([self.steps.pop(number) for number in numbers]))

    def _go_back(self, step: int) -> None:
        """The run started again, from the beginning or from a checkpoint: what it repeats replaces what there was."""
        self.restarts += 1
        self.finished = False
        self.steps = {number: old for number, old in self.steps.items() if number < step}
        self.rows.truncate(self.rows.search("step", step))


def _as_rows(steps: Any) -> Rows:
    return np.array([step.row() for step in steps], LOGGED_ROW)


def has_peak_or_rate(said: LineFields) -> bool:
    """Whether a line is a report beside the step's own line, and opens no step."""
    return said.peak_allocated_bytes is not None or said.peak_reserved_bytes is not None or said.learning_rate is not None
