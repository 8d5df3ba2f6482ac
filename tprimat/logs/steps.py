"""What a log says of one step, as an object while lines may still add to it, and as a row of numbers afterwards."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tprimat.logs.fields import LineFields
from tprimat.records.steps import ABSENT
from tprimat.records.table import Rows, Table

LOGGED_ROW = np.dtype(
    [
        ("step", "i8"),
        ("seconds", "f8"),
        ("mean_since_reset", "?"),
        ("tokens_per_second_per_gpu", "f8"),
        ("sequences_per_second", "f8"),
        ("loss", "f8"),
        ("grad_norm", "f8"),
        ("learning_rate", "f8"),
        ("batch", "i8"),
        ("finite", "?"),
        ("allocated", "i8"),
        ("reserved", "i8"),
    ]
)
LARGEST = 2**53
"""Whole numbers above it are torn text, no count of anything."""


@dataclass(slots=True, kw_only=True)
class LoggedStep:
    """What the log says of one step. None: nothing."""

    step: int
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

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm, where the log has them, are finite and the update was made."""
        return not self.failed and all(value is None or math.isfinite(value) for value in (self.loss, self.grad_norm))

    def row(self) -> tuple[Any, ...]:
        """In the order of LOGGED_ROW. A value that is not finite is absent; `finite` tells of it."""
        return (
            self.step,
            _number(self.seconds),
            self.mean_since_reset,
            _number(self.tokens_per_second_per_gpu),
            _number(self.sequences_per_second),
            _number(self.loss),
            _number(self.grad_norm),
            _number(self.learning_rate),
            _count(self.batch),
            self.finite,
            _count(self.allocated),
            _count(self.reserved),
        )


def logged_step(row: Any) -> LoggedStep:
    """From a row."""
    step, seconds, mean, tokens, sequences, loss, norm, rate, batch, finite, allocated, reserved = row.item()
    values = (None if math.isnan(value) else value for value in (seconds, tokens, sequences, loss, norm, rate))
    seconds, tokens, sequences, loss, norm, rate = values
    counts = (None if value == ABSENT else value for value in (batch, allocated, reserved))
    batch, allocated, reserved = counts
    return LoggedStep(
        step=step,
        seconds=seconds,
        mean_since_reset=mean,
        tokens_per_second_per_gpu=tokens,
        sequences_per_second=sequences,
        loss=loss,
        grad_norm=norm,
        learning_rate=rate,
        batch=batch,
        failed=not finite,
        allocated=allocated,
        reserved=reserved,
    )


def larger(left: int | None, right: int | None) -> int | None:
    """The larger of what is known."""
    if left is None or right is None:
        return right if left is None else left
    return max(left, right)


def _same(new: float, old: float | None) -> bool:
    return old is not None and (new == old or (math.isnan(new) and math.isnan(old)))


def _number(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan


def _count(value: int | None) -> int:
    return value if value is not None and abs(value) < LARGEST else ABSENT


# The fields of a log's lines, gathered by step as they come: doubled lines once, later lines of a step added to it.

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


# When the steps of a log took how long: as printed, derived from rates, or freed from the mean that Megatron-LM prints.

LOOKED_AT = 100
"""First steps among which there is a third with a time, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step trains on, as far as the log or the user tells."""

    gpus: int | None = None
    global_batch_sequences: int | None = None
    sequence_tokens: int | None = None


def batches(rows: Rows, workload: Workload) -> NDArray[np.int64]:
    """Sequences of each step; ABSENT where nothing tells."""
    return np.where(rows["batch"] > 0, rows["batch"], workload.global_batch_sequences or ABSENT)


def seconds_of(rows: Rows, workload: Workload) -> NDArray[np.float64]:
    """As printed, or derived from a rate over the step alone when the work of the step is known; NaN without either."""
    batch, sequence, gpus = batches(rows, workload), workload.sequence_tokens, workload.gpus
    by_sequences, by_tokens = rows["sequences_per_second"], rows["tokens_per_second_per_gpu"]
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(batch > 0, batch / by_sequences, np.nan)
        if sequence and gpus:
            derived = np.where(batch > 0, batch * sequence / (by_tokens * gpus), np.nan)
            times = np.where(np.isfinite(times), times, derived)
    times = np.where(np.isnan(rows["seconds"]), times, rows["seconds"])
    return np.where(np.isfinite(times) & (times > 0), times, np.nan)


def survey(said: Collection, workload: Workload) -> list[str]:
    """Notes on where the times come from."""
    notes, untimed, derived, means = [], 0, False, False
    gap, before = None, np.empty(0, np.int64)
    for rows in said.blocks():
        missing, printed = np.isnan(seconds_of(rows, workload)), ~np.isnan(rows["seconds"])
        untimed += int(missing.sum())
        derived = derived or bool((~printed & ~missing).any())
        means = means or bool((rows["mean_since_reset"] | (~printed & (rows["tokens_per_second_per_gpu"] > 0))).any())
        gaps = np.diff(np.concatenate((before, rows["step"])))
        gap, before = int(gaps.min(initial=gap or LARGEST)), rows["step"][-1:].copy()
    if derived:
        notes.append("step times are derived from printed rates, with the digits that those have")
    if gap is not None and 1 < gap < LARGEST:
        notes.append(f"the log has one line for {gap} steps" + ("; each time is the mean over them" if means else ""))
    if untimed:
        notes.append(f"{untimed} logged steps have no time and are left out")
    return notes


@dataclass(frozen=True, slots=True)
class Correction:
    """What the second line of Megatron-LM really says of its step."""

    step: int
    seconds: float | None
    """None: nothing certain."""
    loss: float | None
    note: str


def correct_second(said: Collection, workload: Workload) -> Correction | None:
    """Undo the mean in Megatron-LM's second line.

    Since core 0.16 the first line of a process resets neither timer nor losses (training_log, is_first_iteration), so the second
    prints means over both: t2 = n x mean - t1 over n - 1 steps. Older versions reset; which it was shows in the third line,
    and where there is none the second time is dropped.
    """
    logged = said.first(LOOKED_AT)
    times = [seconds for step in logged if (seconds := derived_seconds(step, workload)) is not None]
    if len(logged) < 2 or not (logged[0].mean_since_reset and logged[1].mean_since_reset):
        return None
    first, second = logged[0], logged[1]
    if derived_seconds(first, workload) is None or derived_seconds(second, workload) is None:
        return None
    count = second.step - first.step + 1
    corrected = (count * times[1] - times[0]) / (count - 1)
    if not first_line_resets_nothing(logged) or corrected <= 0:
        return None
    if len(times) == 2:
        note = f"step {second.step} is left out: its time may be a mean with step {first.step}"
        return Correction(second.step, None, None, note)
    if ratio(corrected, times[2]) >= ratio(times[1], times[2]):
        return None
    both = first.loss is not None and second.loss is not None
    loss = (count * second.loss - first.loss) / (count - 1) if both and second.loss and first.loss else None
    note = f"step {second.step}: the log prints the mean with step {first.step}; the step's own time and loss are derived"
    return Correction(second.step, corrected, loss, note)


def derived_seconds(step: LoggedStep, workload: Workload) -> float | None:
    """The time of one step, as printed or derived."""
    seconds = float(seconds_of(np.array([step.row()], LOGGED_ROW), workload)[0])
    return None if math.isnan(seconds) else seconds


def first_line_resets_nothing(logged: Sequence[LoggedStep]) -> bool:
    """Whether the first line can be that of a first iteration: with an interval above 1 it then is no multiple of it."""
    if len(logged) < 3:
        return logged[1].step - logged[0].step == 1 or logged[0].step == 1
    interval = logged[2].step - logged[1].step
    return interval == 1 or logged[0].step % interval != 0


def ratio(left: float, right: float) -> float:
    """How far apart two times are, whichever is larger."""
    return abs(math.log(left / right))
