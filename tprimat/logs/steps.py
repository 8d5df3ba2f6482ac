"""The steps of a log: the fields of its lines collected by step, and the time of each step.

Frameworks repeat lines, spread a step over several lines, restart from a checkpoint, and print rates or means instead of times.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

from tprimat.logs.fields import BEFORE_SWIGLU, NARROW_DTYPES, LineFields
from tprimat.records.limits import LARGEST_STEP, LARGEST_WHOLE, LONGEST_SECONDS, SHORTEST_SECONDS
from tprimat.records.schema import RunRecord

CONFIGURATION = (
    "world_size",
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "context_parallel",
    "expert_parallel",
    "micro_batch_sequences",
    "global_batch_sequences",
    "sequence_tokens",
    "matmul_dtype",
    "fp8",
    "recompute",
)
"""What the processes of one run share."""
FIRST_VALUE_COUNTS = (
    "tokens_per_second_per_gpu",
    "sequences_per_second",
    "tflops_per_gpu",
    "loss",
    "grad_norm",
    "learning_rate",
    "global_batch_sequences",
    "consumed_sequences",
    "consumed_tokens",
    "target_tokens",
)


@dataclass(slots=True, kw_only=True)
class LoggedStep:
    """What the log states about one step. None: nothing."""

    step: int
    step_seconds: float | None = None
    mean_since_reset: bool = False
    dispatched: bool = False
    tokens_per_second_per_gpu: float | None = None
    sequences_per_second: float | None = None
    tflops_per_gpu: float | None = None
    line: int | None = None
    """Number of its first line in the log, from 1."""
    begins: bool = False
    """The first of the log, or of a process that started again."""
    restarted: bool = False
    """The first of a process that started again, so that its time holds start-up."""
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    global_batch_sequences: int | None = None
    consumed_sequences: int | None = None
    """Of all steps so far."""
    consumed_tokens: int | None = None
    sequence_tokens: int | None = None
    """Where the line states it: it grows in curriculum learning."""
    target_tokens: int | None = None
    """Those that have a loss, without padding."""
    failed: bool = False
    """The framework skipped the update or counted a NaN."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None

    def add(self, fields: LineFields) -> None:
        """Fill in what is still unknown. Peaks take the larger value, since each rank may report its own."""
        if self.step_seconds is None:
            self.step_seconds, self.mean_since_reset = fields.step_seconds, fields.mean_since_reset
            self.dispatched = fields.dispatched
        for name in FIRST_VALUE_COUNTS:
            if getattr(self, name) is None:
                setattr(self, name, getattr(fields, name))
        length = fields.evidence.get("sequence_tokens")
        if self.sequence_tokens is None and fields.step is not None and isinstance(length, int):
            self.sequence_tokens = length
        self.failed = self.failed or bool(fields.skipped_steps) or bool(fields.nan_steps)
        self.peak_allocated_bytes = larger(self.peak_allocated_bytes, fields.peak_allocated_bytes)
        self.peak_reserved_bytes = larger(self.peak_reserved_bytes, fields.peak_reserved_bytes)

    def repeats(self, fields: LineFields) -> bool:
        """Whether a line repeats what is known: the same time, or without a time the same loss and rate."""
        return (
            (fields.step_seconds is None or _same(fields.step_seconds, self.step_seconds))
            and (fields.loss is None or _same(fields.loss, self.loss))
            and (
                fields.tokens_per_second_per_gpu is None
                or _same(fields.tokens_per_second_per_gpu, self.tokens_per_second_per_gpu)
            )
        )

    def merges(self, fields: LineFields, *, newest: bool) -> bool:
        """Whether a line of the same process may describe this step too: it adds what is unknown, or comes from another rank.

        Ranks print the same loss with rates or times of their own, which a process that starts again does not.
        """
        same_loss = fields.loss is None or self.loss is None or _same(fields.loss, self.loss)
        if self.step_seconds is not None:
            return newest and same_loss and None not in {fields.loss, self.loss} and not fields.mean_since_reset
        rate = fields.sequences_per_second
        return same_loss and (None in {rate, self.sequences_per_second} or rate == self.sequences_per_second)

    @property
    def finite(self) -> bool:
        """Whether the update was made, and loss and gradient norm are finite where the log has them."""
        return not self.failed and all(value is None or math.isfinite(value) for value in (self.loss, self.grad_norm))


def larger(left: int | None, right: int | None) -> int | None:
    """Return the larger of the known values."""
    if left is None or right is None:
        return right if left is None else left
    return max(left, right)


def _same(new: float, old: float | None) -> bool:
    return old is not None and (new == old or (math.isnan(new) and math.isnan(old)))


def describes_step(fields: LineFields) -> bool:
    """Whether a line with a step number says how the step went, unlike a memory report."""
    values = (fields.step_seconds, fields.loss, fields.tokens_per_second_per_gpu, fields.sequences_per_second)
    return any(value is not None for value in values)


def is_report(fields: LineFields) -> bool:
    """Whether a line without times only adds to a step that another line opens."""
    values = (fields.peak_allocated_bytes, fields.peak_reserved_bytes, fields.learning_rate)
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
    _current: LoggedStep | None = None
    _next_tflops: float | None = None
    """Printed on a separate line before the step."""
    _in_dump: bool = False
    _implied: set[str] = field(default_factory=set)
    """Arguments that an old dump implies without printing them."""
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
        if length := self._sequence_of(fields):
            fields = replace(fields, evidence={**fields.evidence, "sequence_tokens": length})
        if fields.run is not None:
            self._begin(fields.run)
        self._follow_dump(fields, line)
        if self.steps and fields.step is None and (fields.dump == "begins" or "world_size" in fields.evidence):
            self._new_process = True
        for name, value in fields.evidence.items():
            self._add_evidence(name, value, line, stepping=fields.step is not None)
        for name, text in fields.arguments.items():
            if self._outranks(name):
                self.arguments[name], self.evidence_line[name] = text, line
        self.total_steps = fields.total_steps or self.total_steps
        self.finished = self.finished or fields.finished
        if fields.accelerator and fields.accelerator != self.accelerator:
            self.accelerator, self.evidence_line["accelerator"] = fields.accelerator, line
        self.device_used_bytes = larger(self.device_used_bytes, fields.device_used_bytes)
        if fields.global_batch_sequences is not None:
            self._add_evidence("global_batch_sequences", fields.global_batch_sequences, line, stepping=fields.step is not None)
        if fields.step is not None:
            if 0 < fields.step <= LARGEST_STEP:
                self._add_step(fields, fields.step, line)
        elif fields.tflops_per_gpu is not None:
            self._next_tflops = fields.tflops_per_gpu
        elif self._current is not None:
            self._current.add(fields)

    def _sequence_of(self, fields: LineFields) -> int | None:
        """Return the tokens of a sequence by which Megatron-DeepSpeed's counts have grown since the line before."""
        tokens, sequences, former = fields.consumed_tokens, fields.consumed_sequences, self._current
        if not tokens or not sequences or fields.step == self.newest:
            return None
        if former is not None and former.step < (fields.step or 0) and former.consumed_tokens and former.consumed_sequences:
            tokens, sequences = tokens - former.consumed_tokens, sequences - former.consumed_sequences
        return tokens // sequences if tokens > 0 and sequences > 0 and tokens % sequences == 0 else None

    def _begin(self, run: RunRecord) -> None:
        """Drop the steps of the run before: the log now tells of another one, which starts at step 1."""
        if self.steps:
            self._go_back(1)
        self.run, self._current = run, None

    def _follow_dump(self, fields: LineFields, line: int) -> None:
        """Note where the dump of arguments begins and ends."""
        if fields.dump == "ends" and self._in_dump:
            self._complete_old_dump(line)
        if fields.dump is not None or fields.step is not None:
            self._in_dump = fields.dump == "begins"

    def _complete_old_dump(self, line: int) -> None:
        """Add what a dump of before `swiglu` implies. GPT-NeoX, whose values end in '.default', has arguments of its own."""
        printed = self.arguments
        if ("swiglu" in printed and "swiglu" not in self._implied) or not all(
            printed.get(name, "").isdecimal() for name in ("num_layers", "hidden_size")
        ):
            return
        implied = BEFORE_SWIGLU | {"ffn_hidden_size": str(4 * int(printed["hidden_size"]))}
        if printed.get("glu_activation", "None") != "None":
            implied["swiglu"] = "True"
        for name, text in implied.items():
            if name not in printed or name in self._implied:
                printed[name], self.evidence_line[name] = text, line
                self._implied.add(name)

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
        if narrow or not self._outranks(name, stepping=stepping):
            return
        if self.evidence.get(name) != value:
            self.evidence[name] = value
            self.evidence_line[name] = line

    def _add_step(self, fields: LineFields, step: int, line: int) -> None:
        known = self.steps.get(step)
        if known is not None and self._describes_again(known, fields):
            known.add(fields)
            if describes_step(fields):
                self._new_process = False  # a copy of what another rank printed
        elif not describes_step(fields) and is_report(fields):
            self._reports[step] = fields
        else:
            self._open(fields, step, line)

    def _describes_again(self, known: LoggedStep, fields: LineFields) -> bool:
        """Whether a line adds to a step that is known, instead of beginning it in a process that started again."""
        newest = known.step == self.newest
        if not describes_step(fields):
            return is_report(fields) or (newest and not self._new_process)  # Composer opens a step by its number alone
        return known.repeats(fields) or (not self._new_process and known.merges(fields, newest=newest))

    def _open(self, fields: LineFields, step: int, line: int) -> None:
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
        return {name: self.evidence.get(name) for name in CONFIGURATION} | self.arguments | {"accelerator": self.accelerator}

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step trains on, as far as the log or the user states it."""

    gpus: int | None = None
    global_batch_sequences: int | None = None
    sequence_tokens: int | None = None


def batch_of(step: LoggedStep, workload: Workload) -> int | None:
    """Return the sequences of a step: as logged with the step, else those of the workload."""
    batch = step.global_batch_sequences
    return batch if batch is not None and 0 < batch <= LARGEST_WHOLE else workload.global_batch_sequences or None


def sequence_of(step: LoggedStep, workload: Workload) -> int | None:
    """Return the tokens of a sequence of a step: as logged with the step, else those of the workload."""
    return step.sequence_tokens or workload.sequence_tokens


def seconds_of(step: LoggedStep, workload: Workload) -> float | None:
    """Return the time of a step: as printed, or derived from a rate over this step where its work is known."""
    if step.step_seconds is not None and math.isfinite(step.step_seconds):
        return step.step_seconds if SHORTEST_SECONDS <= step.step_seconds <= LONGEST_SECONDS else None
    batch, sequence, gpus = batch_of(step, workload), sequence_of(step, workload), workload.gpus
    if batch is None:
        return None
    seconds = quotient(batch, step.sequences_per_second)
    if seconds is None and sequence and gpus and step.tokens_per_second_per_gpu is not None:
        seconds = quotient(float(batch) * sequence, step.tokens_per_second_per_gpu * gpus)
    return seconds if seconds is not None and SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS else None


def quotient(amount: float, rate: float | None) -> float | None:
    """Divide an amount by a rate; None where the rate is absent or the result is not a finite number."""
    if not rate or not math.isfinite(rate):
        return None
    seconds = amount / rate
    return seconds if math.isfinite(seconds) else None


def step_times(contents: LogContents, workload: Workload) -> tuple[dict[int, float | None], list[str]]:
    """Return the time of each step by its number, None where it has no time that counts, and notes on where the times come from.

    One log has one clock: where it prints times, a rate of samples alone (DeepSpeed's timer) gives none.
    """
    times = {step.step: seconds_of(step, workload) for step in contents.steps.values()}
    notes = timing_notes(contents, workload)
    if any(is_printed(step) for step in contents.steps.values()):
        rates = [step.step for step in contents.steps.values() if not is_printed(step) and step.sequences_per_second]
        times |= dict.fromkeys(rates)
        if rates:
            notes.append(f"left out, with a rate of the framework's timer and no time: {names_of(rates)}")
    if restarted := [step.step for step in contents.steps.values() if step.restarted and times[step.step] is not None]:
        times |= dict.fromkeys(restarted)
        notes.append(f"left out, since a process started again in it: {names_of(restarted)}")
    if ahead := ahead_of_device(contents, times):
        times |= dict.fromkeys(ahead)
        notes.append(f"left out, since the host ran ahead of the device: {names_of(ahead)}")
    for left_out, note in (other_batches(contents, workload), other_sequences(contents), first_line_of(contents, times)):
        times |= dict.fromkeys(left_out)
        notes += [note] if note else []
    return times, notes


def other_batches(contents: LogContents, workload: Workload) -> tuple[list[int], str | None]:
    """Return the steps of another global batch than the last one, as in a batch ramp-up, and a note.

    A line for several steps prints the batch of the last of them. It counts where the samples consumed since the line before show
    that all had this batch, or where that line had it.
    """
    logged = list(contents.steps.values())
    batches = {step.step: batch_of(step, workload) for step in logged}
    sizes = {batch for batch in batches.values() if batch is not None}
    if len(sizes) < 2:
        return [], None
    steady = batches[logged[-1].step]
    left_out = [step.step for step in logged if batches[step.step] != steady]
    left_out += [
        step.step
        for former, step in pairwise(logged)
        if batches[former.step] != steady == batches[step.step]
        and step.step - former.step > 1
        and mean_batch(former, step) != steady
    ]
    changes = f"the global batch changes from {min(sizes)} to {max(sizes)} sequences"
    return left_out, f"{changes}: only steps with the last, {steady}, count; left out: {names_of(sorted(left_out))}"


def other_sequences(contents: LogContents) -> tuple[list[int], str | None]:
    """Return the steps with sequences of another length than the last ones, as in curriculum learning, and a note.

    A line for several steps prints the length of the last of them.
    """
    logged = list(contents.steps.values())
    lengths = [step.sequence_tokens for step in logged if step.sequence_tokens]
    if len(set(lengths)) < 2:
        return [], None
    steady = lengths[-1]
    left_out = {step.step for step in logged if step.sequence_tokens != steady}
    left_out |= {step.step for former, step in pairwise(logged) if former.step in left_out and step.step - former.step > 1}
    changes = f"sequences grow or shrink from {lengths[0]} to {steady} tokens"
    return sorted(left_out), f"{changes}: only steps with the last length count; left out: {names_of(sorted(left_out))}"


def mean_batch(former: LoggedStep, step: LoggedStep) -> float | None:
    """Return the mean global batch of the steps since the line before, by the samples consumed; None where not printed."""
    if former.consumed_sequences is None or step.consumed_sequences is None or step.begins:
        return None
    return (step.consumed_sequences - former.consumed_sequences) / (step.step - former.step)


SLOW_FIRST_LINE = 1.05
"""Times the median of the other lines, from which the first line of a log that begins later than step 1 holds start-up."""


def first_line_of(contents: LogContents, times: Mapping[int, float | None]) -> tuple[list[int], str | None]:
    """Return the first line where it holds the start of a process although its number is not 1, and a note.

    Step 1 is left out of every analysis. So is a first line for several steps, which is a mean with step 1. A log that begins
    later is resumed or cut, and only its times can tell: a resumed process starts slowly.
    """
    logged = list(contents.steps.values())
    if not logged or logged[0].step == 1 or times[logged[0].step] is None:
        return [], None
    first = logged[0].step
    rest = [seconds for step in logged[1:] if (seconds := times[step.step]) is not None]
    if 1 < first <= interval_of(logged) and is_mean(logged[0]):
        return ([first], f"left out, since it is a mean with start-up: step {first}") if rest else ([], None)
    begins = f"the log begins at step {first}"
    if not rest:
        return [], f"{begins} and has one line: nothing tells whether its time holds start-up"
    slowness = (times[first] or 0) / statistics.median(rest)
    if slowness > SLOW_FIRST_LINE and (times[first] or 0) > max(rest):
        return [first], f"{begins}, which takes {slowness:.2f} times as long as the others: left out as start-up"
    return [], f"{begins}, which is no slower than the others: it counts"


MOST_NAMES = 10


def names_of(steps: Sequence[int]) -> str:
    """Return 'steps 2, 3', of many steps the first ones and how many more."""
    more = len(steps) - MOST_NAMES
    numbers = ", ".join(map(str, steps[:MOST_NAMES]))
    return f"step{'s' if len(steps) > 1 else ''} {numbers}" + (f" and {more} more" if more > 0 else "")


def is_printed(step: LoggedStep) -> bool:
    """Whether the log prints the time of a step, instead of a rate."""
    return step.step_seconds is not None and math.isfinite(step.step_seconds)


DISPATCHED_STEPS = 3
"""The first steps of a JAX process, whose times may cover less than their work."""
RUN_AHEAD_STEPS = 10
"""Among so many first steps, the host is looked for running ahead of the device."""
SHORT, LONG = 0.5, 1.5
"""Shares of a settled step's time, below which a step was only dispatched, and above which it waited for those before it."""


def ahead_of_device(contents: LogContents, times: dict[int, float | None]) -> list[int]:
    """Return the steps whose printed time covers their dispatch only, and the step after them that waits for their work.

    JAX returns from a step before the device has run it. The times settle as soon as the queue is full. In a log that is too
    short to show a settled time, the steps after the first are not believed.
    """
    first = [step for step in islice(contents.steps.values(), RUN_AHEAD_STEPS) if step.dispatched]
    if not first:
        return []
    settled = [seconds for seconds in list(times.values())[DISPATCHED_STEPS:] if seconds is not None]
    if not settled:
        return [step.step for step in first[1:]] if first[0].step == 1 else []
    median = statistics.median(settled)
    left_out: list[int] = []
    for step in first:
        seconds = times[step.step]
        waited = bool(left_out) and left_out[-1] == step.step - 1 and seconds is not None and seconds > LONG * median
        if waited or (seconds is not None and seconds < SHORT * median):
            left_out.append(step.step)
    return left_out


def timing_notes(contents: LogContents, workload: Workload) -> list[str]:
    """Say where the step times come from."""
    steps = list(contents.steps.values())
    times = [seconds_of(step, workload) for step in steps]
    printed = [is_printed(step) for step in steps]
    notes = []
    if any(seconds is not None and not has_time for seconds, has_time in zip(times, printed, strict=True)):
        notes.append("step times are derived from printed rates, with the digits that those have")
    gap = interval_of(steps)
    if gap > 1:
        means = any(is_mean(step) for step in steps)
        notes.append(f"the log has one line for {gap} steps" + ("; each time is the mean over them" if means else ""))
    if lost := [former.step + gap for former, later in pairwise(steps) if not former.begins and later.step > former.step + gap]:
        notes.append(f"lines are missing in the log: from {names_of(lost)} on")
    if untimed := times.count(None):
        notes.append(f"logged steps without a time, which are left out: {untimed}")
    return notes


def interval_of(steps: Sequence[LoggedStep]) -> int:
    """Return how many steps a line stands for: the most frequent distance between lines.

    The first line of a process may stand for fewer: torchtitan prints step 1, then 10, 20, and so on.
    """
    pairs = list(pairwise(steps))
    settled = [(former, later) for former, later in pairs if not former.begins]
    return min(statistics.multimode([later.step - former.step for former, later in settled or pairs] or [1]))


def is_mean(step: LoggedStep) -> bool:
    """Whether the time of a line is a mean over the steps since the line before, rather than that of its last step."""
    derived = not is_printed(step) and bool(step.tokens_per_second_per_gpu or step.sequences_per_second)
    return step.mean_since_reset or derived
