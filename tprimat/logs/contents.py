"""What a log has stated so far: the fields of its lines collected by step, and settings with the lines that state them.

Frameworks repeat lines, spread a step over several lines, and restart from a checkpoint.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from tprimat.core.limits import LARGEST_STEP, LARGEST_WHOLE
from tprimat.logs.fields import LineFields
from tprimat.records.schema import RunRecord

FIRST_VALUE_COUNTS = (
    "tokens_per_second_per_gpu",
    "sequences_per_second",
    "tflops_per_gpu",
    "loss",
    "grad_norm",
    "learning_rate",
    "global_batch_sequences",
    "consumed_sequences",
    "sequence_tokens",
    "target_tokens",
)
NARROW_DTYPES = {"fp8", "fp4", "int8", "int4"}
"""Of products, in a program whose other dtype is bf16 or the like."""


@dataclass(slots=True, kw_only=True)
class LoggedStep(LineFields):
    """What the log states about one step, on one line or several."""

    step: int
    line: int
    """Number of its first line in the log, from 1."""
    begins: bool = False
    """The first of the log, or of a process that started again."""
    restarted: bool = False
    """The first of a process that started again, so that its time holds start-up."""

    def add(self, fields: LineFields) -> None:
        """Fill in what is still unknown. Peaks take the larger value, since each rank may report its own."""
        if self.step_seconds is None:
            self.step_seconds, self.mean_since_reset = fields.step_seconds, fields.mean_since_reset
        for name in FIRST_VALUE_COUNTS:
            if getattr(self, name) is None:
                setattr(self, name, getattr(fields, name))
        self.failed = self.failed or fields.failed
        self.peak_allocated_bytes = larger(self.peak_allocated_bytes, fields.peak_allocated_bytes)
        self.peak_reserved_bytes = larger(self.peak_reserved_bytes, fields.peak_reserved_bytes)

    def repeats(self, fields: LineFields) -> bool:
        """Whether a line repeats what is known: the same time, or without a time the same loss and rate."""
        names = ("step_seconds", "loss", "tokens_per_second_per_gpu")
        return all(getattr(fields, name) is None or same(getattr(fields, name), getattr(self, name)) for name in names)

    def merges(self, fields: LineFields, *, newest: bool) -> bool:
        """Whether a line of the same process may describe this step too: it adds what is unknown, or comes from another rank.

        Ranks print the same loss with rates or times of their own, which a process that starts again does not.
        """
        same_loss = fields.loss is None or self.loss is None or same(fields.loss, self.loss)
        if self.step_seconds is not None:
            return newest and same_loss and None not in {fields.loss, self.loss} and not fields.mean_since_reset
        rate = fields.sequences_per_second
        return same_loss and (None in {rate, self.sequences_per_second} or rate == self.sequences_per_second)

    @property
    def finite(self) -> bool:
        """Whether the update was made, and loss and gradient norm are finite where the log has them."""
        return not self.failed and all(value is None or math.isfinite(value) for value in (self.loss, self.grad_norm))

    @property
    def is_printed(self) -> bool:
        """Whether the log prints the time of the step, instead of a rate."""
        return self.step_seconds is not None and math.isfinite(self.step_seconds)

    @property
    def is_mean(self) -> bool:
        """Whether its time is a mean over the steps since the line before, rather than that of the last of them."""
        rate = self.tokens_per_second_per_gpu or self.sequences_per_second
        return self.mean_since_reset or (not self.is_printed and bool(rate))


def larger(left: int | None, right: int | None) -> int | None:
    """Return the larger of the known values."""
    return max((value for value in (left, right) if value is not None), default=None)


def same(new: float, old: float | None) -> bool:
    """Whether two printed numbers are the same, nan included."""
    return old is not None and (new == old or (math.isnan(new) and math.isnan(old)))


def describes_step(fields: LineFields) -> bool:
    """Whether a line with a step number says how the step went, unlike a memory report."""
    values = (fields.step_seconds, fields.loss, fields.tokens_per_second_per_gpu, fields.sequences_per_second)
    return any(value is not None for value in values)


@dataclass(slots=True)
class LogContents:
    """Everything a log has stated so far."""

    steps: dict[int, LoggedStep] = field(default_factory=dict)
    """By number, rising."""
    first_line: int | None = None
    """Line number of the first step, from 1."""
    evidence: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    """Megatron's arguments that describe the model, as printed."""
    evidence_line: dict[str, int] = field(default_factory=dict)
    """Of evidence and arguments."""
    total_steps: int | None = None
    finished: bool = False
    accelerator: str | None = None
    device_used_bytes: int | None = None
    restarts: int = 0
    """How often the step number went back."""
    changes: list[str] = field(default_factory=list)
    """What differed in processes that started again, so that the steps before them are those of another configuration."""
    run: RunRecord | None = None
    """The record that TPrimat printed before the first step."""
    _reports: dict[int, LineFields] = field(default_factory=dict)
    """Of memory and learning rates, before the line of their step."""
    _current: LoggedStep | None = None
    _next_tflops: float | None = None
    """Printed on a separate line before the step."""
    _in_dump: bool = False
    _new_process: bool = False
    """Settings of a process were printed after steps."""
    _configuration: dict[str, Any] = field(default_factory=dict)
    """Of the process that made the steps so far."""
    _dtypes: list[str] = field(default_factory=list)
    """Those printed since the last step."""
    _rank: dict[str, int] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """Number of the last step; 0 before the first."""
        return self._current.step if self._current is not None else 0

    def add(self, fields: LineFields, line: int) -> None:
        """Take in one line."""
        stepping = fields.step is not None
        if fields.run is not None:
            self._begin(fields.run)
        if fields.dump is not None or stepping:
            self._in_dump = fields.dump == "begins"
        if self.steps and not stepping and (fields.dump == "begins" or "world_size" in fields.evidence):
            self._new_process = True
        of_step = {"global_batch_sequences": fields.global_batch_sequences, "sequence_tokens": fields.sequence_tokens}
        for name, value in (*fields.evidence.items(), *of_step.items()):
            if value is not None:
                self._add_evidence(name, value, line, stepping=stepping)
        for name, text in fields.arguments.items():
            if self._outranks(name):
                self.arguments[name], self.evidence_line[name] = text, line
        self.total_steps = fields.total_steps or self.total_steps
        self.finished = self.finished or fields.finished
        if fields.accelerator and fields.accelerator != self.accelerator:
            self.accelerator, self.evidence_line["accelerator"] = fields.accelerator, line
        self.device_used_bytes = larger(self.device_used_bytes, fields.device_used_bytes)
        if fields.step is not None:
            if 0 < fields.step <= LARGEST_STEP:
                self._add_step(fields, fields.step, line)
        elif fields.tflops_per_gpu is not None:
            self._next_tflops = fields.tflops_per_gpu

    def add_settings(self, others: "LogContents") -> None:
        """Take over the settings that another reading of the same lines has seen, where this one has none."""
        self.evidence = others.evidence | self.evidence
        self.arguments = others.arguments | self.arguments
        self.evidence_line = others.evidence_line | self.evidence_line

    def _begin(self, run: RunRecord) -> None:
        """Drop the steps of the run before: the log now tells of another one, which starts at step 1."""
        if self.steps:
            self._go_back(1)
        self.run, self._current = run, None

    def _outranks(self, name: str, *, stepping: bool = False) -> bool:
        """Whether a value on this line counts more than those before: a step's over the argument dump's over any other line's."""
        rank = 2 if stepping else int(self._in_dump)
        if rank < self._rank.get(name, 0):
            return False
        self._rank[name] = rank
        return True

    def _add_evidence(self, name: str, value: Any, line: int, *, stepping: bool) -> None:
        """Keep the last value of the highest rank: frameworks print what was requested before what they run.

        But fp8 and narrower dtypes run on top of bf16.
        """
        if isinstance(value, int) and not isinstance(value, bool) and not 0 < value <= LARGEST_WHOLE:
            return  # torn text
        if name == "matmul_dtype":
            self._dtypes.append(value)
        narrow = name == "matmul_dtype" and self.evidence.get(name) in NARROW_DTYPES and value not in NARROW_DTYPES
        if not narrow and self._outranks(name, stepping=stepping) and self.evidence.get(name) != value:
            self.evidence[name], self.evidence_line[name] = value, line

    def _add_step(self, fields: LineFields, step: int, line: int) -> None:
        """Add a line to its step, which may be known from another line, or from a process before a restart."""
        known = self.steps.get(step)
        if not describes_step(fields):
            if known is not None:
                known.add(fields)
            else:
                self._reports[step] = fields
        elif known is not None and (
            known.repeats(fields) or (not self._new_process and known.merges(fields, newest=step == self.newest))
        ):
            known.add(fields)
            self._new_process = False  # a copy of what another rank printed
        else:
            self._open(fields, step, line)

    def _open(self, fields: LineFields, step: int, line: int) -> None:
        """Begin a step, and where the number goes back or settings came before it, a process."""
        former = self._configuration.get("world_size")
        resized = former is not None and self.evidence.get("world_size") != former  # Primus prints it with each step
        restarted = bool(self.steps) and (self._new_process or resized or step <= self.newest)
        first = next(iter(self.steps), step)
        if self.steps and step <= self.newest:
            self._go_back(step)
        if restarted:
            self._forget_dtype()
            self._drop_other_configuration(first)
        self._dtypes.clear()
        begins = restarted or not self.steps
        if begins:
            self._configuration = self._stated()
            self._new_process = False
        if not self.steps:
            self.first_line = line
        self._current = LoggedStep(
            step=step, line=line, begins=begins, restarted=restarted and step > 1, tflops_per_gpu=self._next_tflops
        )
        self._next_tflops = None
        self._current.add(fields)
        if report := self._reports.pop(step, None):
            self._current.add(report)
        self.steps[step] = self._current

    def _forget_dtype(self) -> None:
        """Give up a narrow dtype of earlier processes where this one printed a wider one alone, or its settings without any."""
        if self._dtypes and not NARROW_DTYPES & set(self._dtypes):
            self.evidence["matmul_dtype"] = self._dtypes[-1]
        elif self._new_process and not self._dtypes and self.evidence.get("matmul_dtype") in NARROW_DTYPES:
            del self.evidence["matmul_dtype"]
            self.evidence_line.pop("matmul_dtype", None)

    def _stated(self) -> dict[str, Any]:
        """Return what the processes of one run share, as far as the log has stated it: settings, model and accelerator."""
        shared = {name: value for name, value in self.evidence.items() if name != "rank_parameters"}
        return shared | self.arguments | {"accelerator": self.accelerator}

    def _drop_other_configuration(self, first: int) -> None:
        """Drop the steps of earlier processes where this one runs something else: a record is that of one configuration."""
        stated = self._stated()
        changed = [
            f"{name} {former}, then {'not stated' if stated.get(name) is None else stated[name]}"
            for name, former in self._configuration.items()
            if former is not None and stated.get(name) != former
        ]
        if changed:
            self.changes.append(
                f"steps from {first} to {self.newest} are left out, since a later process ran another configuration: "
                f"{'; '.join(changed)}"
            )
            self.steps.clear()

    def _go_back(self, step: int) -> None:
        """Drop the steps from `step` on: the run restarted, from the beginning or a checkpoint, and repeats them."""
        self.restarts += 1
        self.finished = False
        while self.steps and next(reversed(self.steps)) >= step:
            self.steps.popitem()
