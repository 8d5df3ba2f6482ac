"""The fields of a log's lines, gathered by step as they come: doubled lines once, later lines of a step added to it."""

import math
from dataclasses import dataclass, field
from typing import Any

from tprimat.engines.base import LineFields


@dataclass(slots=True, kw_only=True)
class LoggedStep:
    """What the log says of one step. None: nothing."""

    step: int
    line: int
    """In the log, from 1."""
    seconds: float | None = None
    mean_since_reset: bool = False
    tokens_per_second_per_gpu: float | None = None
    sequences_per_second: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    batch: int | None = None
    failed: bool = False
    """The framework skipped the update or counted a NaN."""
    allocated: int | None = None
    reserved: int | None = None

    def add(self, said: LineFields) -> None:
        """Fill what is not known yet; the larger peak counts, since each rank may report its own."""
        if self.seconds is None:
            self.seconds, self.mean_since_reset = said.step_seconds, said.mean_since_reset
        if self.tokens_per_second_per_gpu is None:
            self.tokens_per_second_per_gpu = said.tokens_per_second_per_gpu
        if self.sequences_per_second is None:
            self.sequences_per_second = said.sequences_per_second
        if self.loss is None:
            self.loss = said.loss
        if self.grad_norm is None:
            self.grad_norm = said.grad_norm
        if self.learning_rate is None:
            self.learning_rate = said.learning_rate
        if self.batch is None:
            self.batch = said.global_batch_sequences
        self.failed = self.failed or bool(said.skipped_steps) or bool(said.nan_steps)
        self.allocated = larger(self.allocated, said.peak_allocated_bytes)
        self.reserved = larger(self.reserved, said.peak_reserved_bytes)

    def repeats(self, said: LineFields) -> bool:
        """Whether a line says again what is known: the same time, or where there is none the same loss and rate."""
        return (
            (said.step_seconds is None or _same(said.step_seconds, self.seconds))
            and (said.loss is None or _same(said.loss, self.loss))
            and (said.tokens_per_second_per_gpu is None or _same(said.tokens_per_second_per_gpu, self.tokens_per_second_per_gpu))
        )


def _same(new: float, old: float | None) -> bool:
    return old is not None and (new == old or (math.isnan(new) and math.isnan(old)))


def larger(left: int | None, right: int | None) -> int | None:
    """The larger of what is known."""
    if left is None or right is None:
        return right if left is None else left
    return max(left, right)


def measures(said: LineFields) -> bool:
    """Whether a line with a step tells how the step went, unlike a memory report."""
    values = (said.step_seconds, said.loss, said.tokens_per_second_per_gpu, said.sequences_per_second)
    return any(value is not None for value in values)


@dataclass(slots=True)
class Collection:
    """Everything that a log said so far."""

    steps: dict[int, LoggedStep] = field(default_factory=dict)
    """In the order of the log, which is ascending."""
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
            self._add_step(said, said.step, line)
        elif self._current is not None:
            self._current.add(said)

    def _learn(self, name: str, value: Any, line: int) -> None:
        """The last word counts: frameworks print what was asked first and what they run later. But fp8 runs on top of bf16."""
        if name == "matmul_dtype" and self.evidence.get(name) == "fp8":
            return
        if self.evidence.get(name) != value:
            self.evidence[name] = value
            self.evidence_line[name] = line

    def _add_step(self, said: LineFields, step: int, line: int) -> None:
        known = self.steps.get(step)
        if known is not None and (not measures(said) or known.repeats(said) or known.seconds is None):
            known.add(said)
        elif not measures(said) and has_peak_or_rate(said):
            self._reports[step] = said
        else:
            self._open(said, step, line)

    def _open(self, said: LineFields, step: int, line: int) -> None:
        if self.steps and step <= self._newest():
            self._go_back(step)
        self._current = LoggedStep(step=step, line=line)
        self._current.add(said)
        if report := self._reports.pop(step, None):
            self._current.add(report)
        self.steps[step] = self._current

    def _newest(self) -> int:
        return self._current.step if self._current is not None else 0

    def _go_back(self, step: int) -> None:
        """The run started again, from the beginning or from a checkpoint: what it repeats replaces what there was."""
        self.restarts += 1
        self.finished = False
        self.steps = {number: old for number, old in self.steps.items() if number < step}


def has_peak_or_rate(said: LineFields) -> bool:
    """Whether a line is a report beside the step's own line, and opens no step."""
    return said.peak_allocated_bytes is not None or said.peak_reserved_bytes is not None or said.learning_rate is not None
