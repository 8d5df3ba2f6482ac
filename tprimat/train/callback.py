"""BenchmarkCallback: writes a StepRecord for every optimizer step of any Lightning Trainer.

A step ends when its last rank ends: a tiny all-reduce closes it (of the memory peaks, needed from the worst rank anyway), and the
device event after that all-reduce is the step's end. The host reads the event one step later, when the device has long passed it,
so that measuring adds no synchronization inside a step. Each step is on disk before the next one ends.
"""

import contextlib
import errno
import math
import operator
import os
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tprimat.core.errors import ConfigError, RecordError
from tprimat.core.limits import LARGEST_REAL, LARGEST_WHOLE, SHORTEST_SECONDS
from tprimat.records.environment import tuning_variables
from tprimat.records.evidence import graded
from tprimat.records.schema import Evidence, Outcome, RunRecord, StepRecord
from tprimat.records.store import RunDirectory, cannot_write
from tprimat.train import startup
from tprimat.train.compat import callback_bases, last_logged
from tprimat.train.rank import AnyTrainer, StepLog, Timestamp, note_ended, read_peak_memory, record_timestamp

OWN_STEPS = 1000
REDUCED_LOSS = "reduced_train_loss"
LOSS_METRICS = ("train_loss", "loss")
"""Names under which modules that return no loss log it."""
LOGGED = (REDUCED_LOSS, *LOSS_METRICS, "grad_norm")

LOADS = ("expert_load", "rank_load", "dropped")
"""What a trainer of a mixture of experts returns in addition; fields of StepRecord."""

ON_DEVICE = float("nan")
"""Placeholder for a number on the device, which would have to wait for the whole step; recognized by identity."""

Describe = Callable[[Any, Any], RunRecord]
"""(trainer, module) -> the record of the run; called on every rank when training starts and ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingStep:
    """A step that the device may still be working on."""

    step: int
    end: Timestamp
    values: Tensor
    """On the host, filled once `end` has passed: the numbers that were on the device, then peak allocated and reserved."""
    known: tuple[float | None, ...]
    """Loss, gradient norm, tokens and learning rate, then LOADS, as the host knows them; None is absent, ON_DEVICE is in
    `values`."""
    pauses: tuple[tuple[Timestamp, Timestamp], ...]
    """Begin and end of each validation since the step before."""
    computed: tuple[Timestamp, float] | None
    """When this rank had not yet waited for gradients of others, and the share of its work done by then; None: nobody says."""


class BenchmarkCallback(*callback_bases()):  # type: ignore[misc]
    """Records step time, loss, gradient norm, learning rate, tokens and peak memory of each optimizer step.

    Validation does not count as step time. Fabric has no Trainer and never calls this callback.

    Args:
        run_directory: folder for steps.jsonl and run.json, another one for each run.
        tokens_per_step: tokens that all ranks train on in a step, where training_step returns no "tokens". Those that it returns
            count all ranks too, and are summed over the batches of a step.
        describe: returns the RunRecord when training starts and again when it ends; all ranks call it, rank 0 writes it.
            None: a record of what any Trainer knows; then training goes on if a step cannot be written.
        log: prints the record and each step on rank 0; None prints nothing.

    Raises ConfigError: tokens_per_step is not a whole number; RecordError: when training starts: the folder cannot be written, or
    already holds the steps of a run.
    """

    def __init__(
        self,
        run_directory: str | Path,
        *,
        tokens_per_step: int | None = None,
        describe: Describe | None = None,
        log: StepLog | None = None,
    ) -> None:
        super().__init__()
        self.directory = RunDirectory(Path(run_directory))
        self.tokens_per_step = None if tokens_per_step is None else _checked_tokens(tokens_per_step)
        self.describe = describe or AnyTrainer(self.directory.path.resolve().name).describe
        self._completes = describe is None
        self._variables = tuning_variables()
        self._log = log
        self._training = False
        self._own_seconds: deque[float] = deque(maxlen=OWN_STEPS)
        self._counted: set[int] = set()
        self._logged: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Record what runs, and start the clock."""
        refusal = self._prepare_folder() if trainer.global_rank == 0 else None
        refusal = trainer.strategy.broadcast(refusal)  # on one rank alone, an error leaves the others waiting
        if refusal is not None:
            raise refusal
        startup.reached("training")
        self._recording = True
        self._pending: list[_PendingStep] = []
        self._steps_written = 0
        self._pauses: list[tuple[Timestamp, Timestamp]] = []
        self._losses: list[Any] = []
        self._tokens: list[Any] = []
        self._learning_rate: Any = None
        self._computed: tuple[Timestamp, float] | None = None
        run = self._describe(trainer, pl_module)
        if self._log is not None and trainer.global_rank == 0:
            self._log.start(run)
        self._last_step = trainer.global_step
        if isinstance(hooks := getattr(pl_module, "before_gradient_sync", None), list):
            hooks.append(lambda done: self._note_computed(_device(pl_module), done))
        read_peak_memory(_device(pl_module))
        if dist.is_initialized():
            dist.barrier()
        self._last_end = self._batch_end = record_timestamp(_device(pl_module))
        self._ended_at_seconds: float | None = None
        if run.started_at is not None:  # by the wall clock, which launcher and workers share
            started = datetime.fromisoformat(run.started_at)
            self._ended_at_seconds = (datetime.now(timezone.utc) - started).total_seconds()
        self._training = True

    def _prepare_folder(self) -> RecordError | None:
        path, file = self.directory.path, self.directory.steps_file
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            return cannot_write(path, error)
        if file.exists():
            return RecordError(f"{path} already holds the steps of a run.", where=str(file), fix="another folder for each run")
        return None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the learning rate of the step that begins: when it ends, a scheduler may have changed it."""
        del pl_module, batch, batch_idx
        groups = trainer.optimizers[0].param_groups if trainer.optimizers else ()
        if groups:  # Lightning's stand-in for no optimizer has none
            rate = _scalar(groups[0].get("lr"))
            self._learning_rate = rate.clone() if isinstance(rate, Tensor) else rate  # a scheduler changes a tensor in place

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Close a step, if the optimizer stepped, and write the previous one."""
        del batch, batch_idx
        self._losses.append(_scalar(outputs if isinstance(outputs, Tensor) else _output(outputs, "loss")))
        self._tokens.append(_scalar(_output(outputs, "tokens")))
        device = _device(pl_module)
        if trainer.global_step == self._last_step:
            self._batch_end = record_timestamp(device)
            return
        self._last_step = trainer.global_step
        logged = self._newly_logged(trainer)
        norm, rate, *loads = (_scalar(_output(outputs, name)) for name in ("grad_norm", "learning_rate", *LOADS))
        norm = logged.get("grad_norm") if norm is None else norm
        rate = self._learning_rate if rate is None else rate
        metrics = (self._loss(trainer, pl_module, logged), norm, _sum(self._tokens), rate, *loads)
        on_device = [value.double().reshape(1) for value in metrics if _is_on_device(value)]
        counters = torch.cat([*on_device, _worst_memory(device)])
        values = torch.empty_like(counters, device="cpu", pin_memory=device.type == "cuda")
        values.copy_(counters, non_blocking=True)
        self._batch_end = record_timestamp(device)
        self._pending.append(
            _PendingStep(
                step=trainer.global_step,
                end=self._batch_end,
                values=values,
                known=tuple(ON_DEVICE if _is_on_device(one) else None if one is None else float(one) for one in metrics),
                pauses=tuple(self._pauses),
                computed=self._computed,
            )
        )
        self._computed = None
        self._pauses, self._losses, self._tokens = [], [], []
        self._write(trainer, keep=1 if device.type == "cuda" else 0)

    def _newly_logged(self, trainer: Any) -> dict[str, Any]:
        """Return name -> number of LOGGED, as far as the module has logged it since the step before."""
        fresh = {}
        for key, name, value in last_logged(trainer, LOGGED):
            if value is not self._logged.get(key):
                self._logged[key] = value
                fresh[name] = _scalar(value)
        return fresh

    def _loss(self, trainer: Any, pl_module: Any, logged: Mapping[str, Any]) -> Any:
        """Return the mean loss of the step's batches. Lightning has divided each by the batches that it accumulates."""
        total = _sum(self._losses)
        if REDUCED_LOSS in logged or total is None:
            return next((logged[name] for name in (REDUCED_LOSS, *LOSS_METRICS) if name in logged), None)
        batches = sum(loss is not None for loss in self._losses)
        divided = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        return total if batches == divided else total * (divided / batches)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the time since the last batch out of the step, on the slowest rank, and forget the memory that validation took.

        Lightning starts the loader's processes before on_validation_start.
        """
        del trainer
        if self._training:
            device = _device(pl_module)
            _worst_memory(device)
            began, self._batch_end = self._batch_end, record_timestamp(device)
            self._pauses.append((began, self._batch_end))

    def _note_computed(self, device: torch.device, done: float) -> None:
        self._computed = (record_timestamp(device), done)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the remaining steps, the record with what was observed of the batches, and that the run is complete."""
        self._training = False
        self._write(trainer, keep=0)
        self._describe(trainer, pl_module)
        if self._log is not None and trainer.global_rank == 0:
            self._log.end()
        if trainer.global_rank == 0:
            self._save(lambda: note_ended(self.directory, steps=self._steps_written))
            path = self.directory.path
            print(f"tprimat: measured, in {path}; python3 -m tprimat compare --results-dir {path} shows it")  # noqa: T201

    def _describe(self, trainer: Any, pl_module: Any) -> RunRecord:
        medians = rank_medians(self._own_seconds, _device(pl_module))
        run = self._with_tokens(self.describe(trainer, pl_module))
        run = replace(run, rank_seconds=medians, environment=self._variables)
        if trainer.global_rank == 0:
            if not self._completes:
                with contextlib.suppress(RecordError):  # the launcher has recorded more variables
                    run = replace(run, environment=self.directory.read_run().environment)
            self._save(lambda: self.directory.write_run(run))
        return run

    def _with_tokens(self, run: RunRecord) -> RunRecord:
        """Add the tokens of a step of a user's Trainer, as the user or the module states them; the module goes first."""
        tokens = self.tokens_per_step if not self._counted else next(iter(self._counted))
        if not self._completes or not tokens or len(self._counted) > 1:
            return run
        seen = Evidence(source="running_framework", tokens_per_step=tokens)
        return replace(run, evidence=graded(seen, {"tokens_per_step": "stated"}))

    def _save(self, write: Callable[[], None]) -> None:
        """Write to the folder. If that fails, our own run ends; a user's training goes on."""
        try:
            if self._recording:
                write()
        except RecordError as error:
            if not self._completes:
                raise
            self._recording = False
            warnings.warn(f"{error}\nTraining continues. Its further steps are not recorded.", stacklevel=2)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keep what was measured before a failure, and write how the run ended."""
        del pl_module
        if not self._training:  # not ours: validation after training, or a folder that was refused
            return
        self._training = False
        # A failed device answers nothing more, and the error that ended the run must be the one that is reported.
        with contextlib.suppress(RuntimeError, RecordError):
            self._write(trainer, keep=0)
        if self._completes and trainer.global_rank == 0:
            with contextlib.suppress(RecordError):
                note_ended(self.directory, *_outcome(exception))

    def _write(self, trainer: Any, keep: int) -> None:
        while len(self._pending) > keep:
            pending = self._pending.pop(0)
            pending.end.wait()
            if pending.computed is not None:
                moment, done = pending.computed
                self._own_seconds.append(moment.seconds_since(self._last_end) / done)
            if trainer.global_rank == 0:
                step = self._record(pending, self._last_end)
                self._save(lambda step=step: self.directory.append_step(step))  # type: ignore[misc]
                self._steps_written += 1
                if self._log is not None:
                    self._log.step(step)
            self._last_end = pending.end

    def _record(self, pending: _PendingStep, start: Timestamp) -> StepRecord:
        *read, allocated, reserved = pending.values.tolist()
        from_device = iter(read)
        loss, norm, tokens, rate, *loads = (next(from_device) if value is ON_DEVICE else value for value in pending.known)
        expert_load, rank_load, dropped = loads
        seconds = pending.end.seconds_since(start)
        if self._ended_at_seconds is not None:
            self._ended_at_seconds += seconds
        for begin, end in pending.pauses:
            seconds -= end.seconds_since(begin)
            self._ended_at_seconds = None  # moments that steps do not add up to are taken for a damaged record
        counted = _within(tokens, 0, LARGEST_WHOLE)
        if counted is not None and len(self._counted) <= 1:
            self._counted.add(int(counted))
        return StepRecord(
            step=pending.step,
            step_seconds=max(seconds, SHORTEST_SECONDS),
            tokens=self.tokens_per_step if counted is None else int(counted),
            loss=_within(loss, -LARGEST_REAL, LARGEST_REAL),
            grad_norm=_within(norm, -LARGEST_REAL, LARGEST_REAL),
            learning_rate=_within(rate, -LARGEST_REAL, LARGEST_REAL),
            finite=all(math.isfinite(value) for value in (loss, norm) if value is not None),
            peak_allocated_bytes=None if math.isnan(allocated) else int(allocated),
            peak_reserved_bytes=None if math.isnan(reserved) else int(reserved),
            ended_at_seconds=self._ended_at_seconds,
            expert_load=_within(expert_load, 0, LARGEST_REAL),
            rank_load=_within(rank_load, 0, LARGEST_REAL),
            dropped=_within(dropped, 0, 1),
        )


def rank_medians(own: Collection[float], device: torch.device) -> tuple[float, ...]:
    """Return the median of each rank's times, gathered once; empty where no rank has any. Every rank must call it."""
    medians = torch.tensor([statistics.median(own) if own else 0.0], dtype=torch.float64).to(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        median, medians = medians, medians.new_empty(dist.get_world_size())
        dist.all_gather(list(medians.view(-1, 1)), median)
    return tuple(medians.tolist()) if medians.any() else ()


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _worst_memory(device: torch.device) -> Tensor:
    """Return the peak bytes of the worst rank. The all-reduce also ends the step when the slowest rank ends."""
    own = [math.nan if peak is None else peak for peak in read_peak_memory(device)]
    peaks = torch.tensor(own, dtype=torch.float64).to(device, non_blocking=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    return peaks


def _device(module: Any) -> torch.device:
    return torch.device(module.device)


def _output(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else None


def _scalar(value: Any) -> Any:
    """Return a number, on a device or not; None for anything else that a module returns under the name of one."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        value = value.detach()
        return value.full_tensor() if isinstance(value, DTensor) else value  # every rank has the loss of a parallel module
    try:
        return None if value is None or isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _sum(values: Collection[Any]) -> Any:
    """Return the sum of what is known, in double precision: 64 losses in bf16 add up to a few percent more or less."""
    known = [value.double() if isinstance(value, Tensor) else value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None


def _within(value: float | None, least: float, most: float) -> float | None:
    """Return a number that a record can hold: a wrong one makes the whole file unreadable."""
    return value if value is not None and least <= value <= most else None


def _checked_tokens(tokens: Any) -> int:
    try:
        number = operator.index(tokens)
    except TypeError:
        number = 0
    if not 1 <= number <= LARGEST_WHOLE:
        why = "It is the number of tokens that all ranks train on in a step: a whole number, at least 1."
        raise ConfigError(f"tokens_per_step is {tokens!r}.", why=why, fix='tokens_per_step=262144, or "tokens" in the outputs')
    return number


def _outcome(exception: BaseException) -> tuple[Outcome, str]:
    words = str(exception).strip().partition("\n")[0][:200]
    cause = f"{type(exception).__name__}: {words}" if words else type(exception).__name__
    if isinstance(exception, KeyboardInterrupt | SystemExit):  # Lightning's own for SIGTERM is a SystemExit
        return "interrupted", cause
    return "out_of_memory" if isinstance(exception, torch.OutOfMemoryError) else "failed", cause
