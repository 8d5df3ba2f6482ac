"""What a log has stated so far: the fields of its lines by attempt and step, and settings with the lines that state them.

Frameworks repeat lines and spread a step over several lines; schedulers start a run again into the same log.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tprimat.core.errors import ConfigError
from tprimat.core.limits import LARGEST_STEP, LARGEST_WHOLE
from tprimat.core.rows import DATA, document
from tprimat.logs.fields import LineFields
from tprimat.records.schema import RunRecord

AUTO = "auto"
"""Instead of a model's name: take the shape from the log."""
MODEL_FLAG = "--model-name"
"""The only one that cannot be left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a caller states about a run. None: nothing."""

    model: str = AUTO
    gpus: int | None = None
    nodes: int | None = None
    global_batch_sequences: int | None = None
    sequence_tokens: int | None = None
    tokens_per_step: int | None = None
    """Where batch or sequence length are not known; no flag states it."""
    accelerator: str | None = None

    def over(self, other: "Claims") -> "Claims":
        """Return these claims, with what they do not state from others."""
        stated = {one.name: getattr(self, one.name) for one in fields(Claims)}
        return replace(other, **{name: value for name, value in stated.items() if value not in {None, AUTO}})


FLAGS: Mapping[str, str] = document(DATA / "documents.yaml")["claim_flags"]


def check_claim(flag: str, claimed: int | str | None, logged: int | str | None, where: str) -> None:
    """Refuse a flag that the log contradicts. Raises ConfigError: both state something, and not the same."""
    if claimed in {None, AUTO, logged} or logged in {None, AUTO}:
        return
    raise ConfigError(
        f"{flag} {claimed} contradicts the log, which says {logged}.",
        where=where,
        why="A record keeps what ran.",
        fix=f"auto, or {logged}" if flag == MODEL_FLAG else f"leave {flag} out, or give {logged}",
    )


FIRST_VALUE_COUNTS = (
    *("tokens_per_second_per_gpu", "tokens_per_second", "sequences_per_second", "stamp", "tflops_per_gpu", "loss", "grad_norm"),
    *("learning_rate", "global_batch_sequences", "consumed_sequences", "sequence_tokens"),
)
NARROW_DTYPES = {"fp8", "fp4", "int8", "int4"}
"""Of products, in a program whose other dtype is bf16 or the like."""


@dataclass(slots=True, kw_only=True)
class LoggedStep(LineFields):
    """What the log states about one step, on one line or several."""

    step: int
    line: int
    """Number of its first line in the log, from 1."""

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
            near = abs((fields.step_seconds or self.step_seconds) / self.step_seconds - 1) < 0.1 if self.step_seconds else False
            return newest and same_loss and None not in {fields.loss, self.loss} and (near or not fields.mean_since_reset)
        rate = fields.sequences_per_second
        return same_loss and (None in {rate, self.sequences_per_second} or rate == self.sequences_per_second)

    @property
    def finite(self) -> bool:
        """Whether the update was made, and loss and gradient norm are finite where the log has them."""
        return not self.failed and all(value is None or math.isfinite(value) for value in (self.loss, self.grad_norm))

    @property
    def skips(self) -> bool:
        """Whether the update was not made, though the loss is finite where the log has it: fp16 looks for a scale."""
        return self.failed and (self.loss is None or math.isfinite(self.loss))

    @property
    def is_printed(self) -> bool:
        """Whether the log prints the time of the step, instead of a rate."""
        return self.step_seconds is not None and math.isfinite(self.step_seconds)

    @property
    def is_mean(self) -> bool:
        """Whether its time is a mean over the steps since the line before, rather than that of the last of them."""
        rate = self.tokens_per_second_per_gpu or self.tokens_per_second or self.sequences_per_second
        return self.mean_since_reset or (not self.is_printed and bool(rate))


def larger(left: int | None, right: int | None) -> int | None:
    """Return the larger of the known values."""
    return max((value for value in (left, right) if value is not None), default=None)


def same(new: float, old: float | None) -> bool:
    """Whether two printed numbers are the same, nan included."""
    return old is not None and (new == old or (math.isnan(new) and math.isnan(old)))


def describes_step(fields: LineFields) -> bool:
    """Whether a line with a step number says how the step went, unlike a memory report."""
    names = ("step_seconds", "loss", "tokens_per_second_per_gpu", "tokens_per_second", "sequences_per_second")
    return any(getattr(fields, name) is not None for name in names)


@dataclass(slots=True)
class LogContents:
    """What an attempt has stated so far."""

    steps: dict[int, LoggedStep] = field(default_factory=dict)
    """By number, rising."""
    evidence: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    """Megatron's arguments that describe the model, as printed."""
    evidence_line: dict[str, int] = field(default_factory=dict)
    """Of evidence and arguments."""
    total_steps: int | None = None
    finished: bool = False
    accelerator: str | None = None
    device_used_bytes: int | None = None
    device_used_share: float | None = None
    run: RunRecord | None = None
    """The record that TPrimat printed before the first step."""
    ranks: int = 0  # at least so many, by the marks of lines of steps
    _reports: dict[int, LineFields] = field(default_factory=dict)
    """Of memory and learning rates, before the line of their step."""
    _next_tflops: float | None = None
    """Printed on a separate line before the step."""
    _in_dump: bool = False
    _rank: dict[str, int] = field(default_factory=dict)
    _kinds: list[str] = field(default_factory=list)  # of devices

    @property
    def newest(self) -> int:
        """Number of the last step; 0 before the first."""
        return next(reversed(self.steps), 0)

    def following(self, *, with_settings: bool) -> "LogContents":
        """Return the next attempt, which has the settings of this one until it prints its own (`with_settings`: it does).

        A narrow dtype counts only where it is printed again: the wide one may go without saying.
        """
        gone = with_settings and self.evidence.get("matmul_dtype") in NARROW_DTYPES
        return LogContents(
            evidence={name: value for name, value in self.evidence.items() if not (gone and name == "matmul_dtype")},
            arguments=dict(self.arguments),
            evidence_line=dict(self.evidence_line),
            total_steps=self.total_steps,
            accelerator=self.accelerator,
        )

    def goes_on_with(self, fields: LineFields) -> bool:
        """Whether a line may be of this attempt: its step is the next, or one that it adds to or repeats."""
        step, gpus = fields.step, fields.evidence.get("world_size")
        if step is None or not self.steps or not describes_step(fields):
            return True
        if known := self.steps.get(step):
            return known.repeats(fields) or known.merges(fields, newest=step == self.newest)
        return step > self.newest and gpus in {None, self.evidence.get("world_size", gpus)}  # Primus prints it with each step

    def has_copied(self, fields: LineFields) -> bool:
        """Whether a line is another rank's of the newest step, or of the step after the only one: settings came late, then."""
        known = self.steps.get(fields.step or 0)
        if known is None:
            return len(self.steps) == 1 and fields.step == self.newest + 1
        return fields.step == self.newest and known.repeats(fields)

    def add(self, fields: LineFields, line: int) -> None:
        """Take in one line."""
        stepping = fields.step is not None
        if fields.run is not None:
            self.run = fields.run
        if fields.dump is not None or stepping:
            self._in_dump = fields.dump == "begins"
        of_step = {"global_batch_sequences": fields.global_batch_sequences, "sequence_tokens": fields.sequence_tokens}
        for name, value in (*fields.evidence.items(), *of_step.items()):
            if value is not None:
                self._add_evidence(name, value, line, stepping=stepping)
        for name, text in fields.arguments.items():
            if self._outranks(name):
                self.arguments[name], self.evidence_line[name] = text, line
        self.total_steps = fields.total_steps or self.total_steps
        self.finished = self.finished or fields.finished
        if fields.accelerator and fields.accelerator not in self._kinds:
            self._kinds.append(fields.accelerator)
            self.accelerator, self.evidence_line["accelerator"] = " and ".join(self._kinds), line
        self.device_used_bytes = larger(self.device_used_bytes, fields.device_used_bytes)
        if fields.device_used_share is not None and 0 <= fields.device_used_share <= 1:
            self.device_used_share = max(self.device_used_share or 0.0, fields.device_used_share)
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
        narrow = name == "matmul_dtype" and self.evidence.get(name) in NARROW_DTYPES and value not in NARROW_DTYPES
        if not narrow and self._outranks(name, stepping=stepping) and self.evidence.get(name) != value:
            self.evidence[name], self.evidence_line[name] = value, line

    def _add_step(self, fields: LineFields, step: int, line: int) -> None:
        """Add a line to its step, which may be known from another line."""
        known = self.steps.get(step)
        if known is None and not describes_step(fields):
            self._reports[step] = fields
            return
        if known is None:
            known = self.steps[step] = LoggedStep(step=step, line=line, tflops_per_gpu=self._next_tflops)
            self._next_tflops = None
        known.add(fields)
        if report := self._reports.pop(step, None):
            known.add(report)


@dataclass(slots=True)
class Attempts:
    """The attempts that a log tells of, of which the last one counts."""

    latest: LogContents = field(default_factory=LogContents)
    former: list[LogContents] = field(default_factory=list)

    @property
    def measured(self) -> LogContents:
        """The last attempt with steps; without any the last one."""
        return next((one for one in (self.latest, *reversed(self.former)) if one.steps), self.latest)

    def add(self, fields: LineFields, line: int) -> None:
        """Take in one line, which begins an attempt where a process prints its settings after steps, or steps go back."""
        last = self.latest
        begins = fields.step is None and (fields.dump == "begins" or "world_size" in fields.evidence)
        if fields.run is not None or (begins and last.steps):
            self.begin(with_settings=True)
        elif not last.steps and self.former and fields.step is not None and self.former[-1].has_copied(fields):
            self.latest = self.former.pop()
        elif not last.goes_on_with(fields):
            self.begin(with_settings=False)
        self.latest.add(fields, line)

    def split(self, line: int) -> LogContents:
        """Begin an attempt after a line that was read before: the steps since are its own. Returns the one before."""
        last = self.latest
        self.begin(with_settings=False)
        for number in [number for number, step in last.steps.items() if step.line > line]:
            self.latest.steps[number] = last.steps.pop(number)
        return last

    def begin(self, *, with_settings: bool) -> None:
        """Begin an attempt."""
        if self.latest.steps:
            self.former.append(self.latest)
        self.latest = self.latest.following(with_settings=with_settings)
