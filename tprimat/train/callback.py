"""BenchmarkCallback: writes a StepRecord for every optimizer step of any Lightning Trainer.

A step ends when its last rank ends: a tiny all-reduce closes it (of the memory peaks, needed from the worst rank anyway), and the
device event after that all-reduce is the step's end. The host reads the event one step later, when the device has long passed it,
so that measuring adds no synchronisation inside a step. Each step is on disk before the next one ends.
"""

import contextlib
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tprimat.errors import RecordError
from tprimat.plan.evidence import first_record
from tprimat.plan.schema import RunPlan
from tprimat.records.environment import software_versions
from tprimat.records.schema import RunRecord, StepRecord, finite_or_none
from tprimat.records.store import RunDirectory
from tprimat.train import startup
from tprimat.train.device import PeakMemory, Timestamp, describe_machine, read_peak_memory, record_timestamp, this_node
from tprimat.train.step_log import StepLog

LIGHTNING = "pytorch_lightning" if find_spec("pytorch_lightning") is not None else "lightning.pytorch"
"""Either of its names; NeMo's is `lightning.pytorch`."""
lightning: Any = import_module(LIGHTNING)


def callback_bases() -> tuple[type[Any], ...]:
    """Return the Callback class of each installed Lightning: a Trainer accepts only callbacks of its own package."""
    bases: list[type[Any]] = [lightning.Callback]
    if LIGHTNING == "pytorch_lightning" and find_spec("lightning") is not None:
        from lightning.pytorch import Callback

        bases.append(Callback)
    return tuple(bases)


def quieten() -> None:
    """Keep Lightning's advice out of the training log. Importing Lightning sets the levels, so call this afterwards."""
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def launched_record(plan: RunPlan) -> RunRecord:
    """Return the launcher's record, or a new one, with torch's name of the accelerator."""
    machine = describe_machine(plan.nodes, plan.gpus_per_node)
    try:
        record = RunDirectory(Path(plan.run_directory)).read_run()
    except RecordError:
        started_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        return first_record(plan, machine, started_at)
    seen = record.machine
    return replace(
        record,
        machine=replace(machine, power_limit_watts=seen.power_limit_watts, driver=seen.driver),
        start_up=startup.seconds_since(record.started_at) if record.started_at else {},
    )


def note_completed(directory: RunDirectory) -> None:
    """Mark the run as completed; if our launcher runs, it later writes the final outcome."""
    ended_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    directory.write_run(replace(directory.read_run(), outcome="completed", ended_at=ended_at))


class AnyTrainer:
    """Describes a run of any Lightning Trainer, from what the Trainer knows; the start is noted once."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.started_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")

    def describe(self, trainer: Any, pl_module: Any) -> RunRecord:
        """Return machine, software and the module's name. Layout, batch and dtype are unknown and stay absent."""
        nodes = int(trainer.num_nodes)
        return RunRecord(
            run_id=self.run_id,
            model=type(pl_module).__name__,
            strategy=None,
            engine=LIGHTNING,
            matmul_dtype=None,
            tensor_parallel=None,
            pipeline_parallel=None,
            data_parallel=None,
            micro_batch_sequences=None,
            global_batch_sequences=None,
            sequence_tokens=None,
            machine=(machine := describe_machine(nodes, max(1, int(trainer.world_size) // nodes))),
            nodes=(this_node(machine),) if nodes == 1 else (),
            software=software_versions(),
            started_at=self.started_at,
            clock="step_end",
            outcome="running",
        )


OWN_STEPS = 1000
"""The newest steps of which a rank remembers its own time."""
LOSS_METRICS = ("reduced_train_loss", "train_loss", "loss")
"""Names under which trainers log the loss; NeMo's is the first."""

LOADS = ("expert_load", "rank_load", "dropped")
"""What a trainer of a mixture of experts returns in addition; fields of StepRecord."""

ON_DEVICE = float("nan")
"""Placeholder for a number that the host has not read yet; recognised by identity."""

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
    """Loss, gradient norm and tokens, then LOADS, as the host knows them; None is absent, ON_DEVICE is in `values`."""
    learning_rate: float | None
    computed: Timestamp | None
    """When this rank had its gradients, before it waited for those of the others; None: the module does not say."""


class BenchmarkCallback(*callback_bases()):  # type: ignore[misc]
    """Records step time, loss, gradient norm, learning rate, tokens and peak memory of each optimizer step.

    Args:
        run_directory: folder for steps.jsonl and, if `describe` is given, run.json.
        tokens_per_step: tokens that all ranks train on in a step, where the module's outputs have no "tokens".
        describe: returns the RunRecord when training starts and again when it ends; all ranks call it, rank 0 writes it.
            None: a record of what any Trainer knows.
        log: prints the record and each step on rank 0; None prints nothing.

    Raises:
        RecordError: the folder already holds the steps of another run.
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
        self.tokens_per_step = tokens_per_step
        self.describe = describe or AnyTrainer(self.directory.path.name).describe
        self._completes = describe is None
        self._log = log
        self._pending: list[_PendingStep] = []
        self._last_end: Timestamp | None = None
        self._last_step = 0
        self._ended_at_seconds: float | None = None
        self._learning_rate: float | None = None
        self._computed: Timestamp | None = None
        self._own_seconds: deque[float] = deque(maxlen=OWN_STEPS)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Record what runs, and start the clock."""
        if trainer.global_rank == 0:
            self.directory.path.mkdir(parents=True, exist_ok=True)
            if trainer.global_step == 0 and self.directory.steps_file.exists():
                what = f"{self.directory.path} already holds the steps of a run."
                raise RecordError(what, where=str(self.directory.steps_file), fix="another folder for each run")
        startup.reached("training")
        run = self._describe(trainer, pl_module)
        if self._log is not None and trainer.global_rank == 0:
            self._log.start(run)
        self._last_step = trainer.global_step
        if isinstance(hooks := getattr(pl_module, "before_gradient_sync", None), list):
            hooks.append(lambda: self._note_computed(_device(pl_module)))
        read_peak_memory(_device(pl_module))
        if dist.is_initialized():
            dist.barrier()
        self._last_end = record_timestamp(_device(pl_module))
        self._ended_at_seconds = _seconds_since(run.started_at)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the learning rate of the step that begins: when it ends, a scheduler may have changed it."""
        del pl_module, batch, batch_idx
        if trainer.optimizers:
            rate = trainer.optimizers[0].param_groups[0].get("lr")
            self._learning_rate = None if rate is None else float(rate)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Close a step, if the optimizer stepped, and write the previous one."""
        del batch, batch_idx
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        device = _device(pl_module)
        loads = (_output(outputs, name) for name in LOADS)
        metrics = (_loss(trainer, outputs), _number(trainer, outputs, "grad_norm"), _output(outputs, "tokens"), *loads)
        on_device = [value.detach().double().reshape(1) for value in metrics if _is_on_device(value)]
        counters = torch.cat([*on_device, _worst_memory(read_peak_memory(device), device)])
        values = torch.empty_like(counters, device="cpu", pin_memory=device.type == "cuda")
        values.copy_(counters, non_blocking=True)
        self._pending.append(
            _PendingStep(
                step=trainer.global_step,
                end=record_timestamp(device),
                values=values,
                known=tuple(_known_to_host(value) for value in metrics),
                learning_rate=_output(outputs, "learning_rate", self._learning_rate),
                computed=self._computed,
            )
        )
        self._computed = None
        self._write(trainer, keep=1 if device.type == "cuda" else 0)

    def _note_computed(self, device: torch.device) -> None:
        self._computed = record_timestamp(device)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the remaining steps, and the record with what was observed of the batches."""
        self._write(trainer, keep=0)
        self._describe(trainer, pl_module)
        if self._log is not None and trainer.global_rank == 0:
            self._log.end()
        if self._completes and trainer.global_rank == 0:
            note_completed(self.directory)

    def _describe(self, trainer: Any, pl_module: Any) -> RunRecord:
        run = replace(self.describe(trainer, pl_module), rank_seconds=rank_medians(self._own_seconds, _device(pl_module)))
        if trainer.global_rank == 0:
            self.directory.write_run(run)
        return run

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keep what was measured before a failure."""
        del pl_module, exception
        # A failed device answers nothing more, and the error that ended the run must be the one that is reported.
        with contextlib.suppress(RuntimeError, RecordError):
            self._write(trainer, keep=0)

    def _write(self, trainer: Any, keep: int) -> None:
        while len(self._pending) > keep:
            pending = self._pending.pop(0)
            pending.end.wait()
            if pending.computed is not None and self._last_end is not None:
                self._own_seconds.append(pending.computed.seconds_since(self._last_end))
            if self._last_end is not None and trainer.global_rank == 0:
                step = self._record(pending, self._last_end)
                self.directory.append_step(step)
                if self._log is not None:
                    self._log.step(step)
            self._last_end = pending.end

    def _record(self, pending: _PendingStep, start: Timestamp) -> StepRecord:
        *read, allocated, reserved = pending.values.tolist()
        from_device = iter(read)
        loss, norm, tokens, *loads = (next(from_device) if value is ON_DEVICE else value for value in pending.known)
        expert_load, rank_load, dropped = map(finite_or_none, loads)  # as LOADS names them
        seconds = pending.end.seconds_since(start)
        if self._ended_at_seconds is not None:
            self._ended_at_seconds += seconds
        return StepRecord(
            step=pending.step,
            step_seconds=seconds,
            tokens=self.tokens_per_step if tokens is None else int(tokens),
            loss=finite_or_none(loss),
            grad_norm=finite_or_none(norm),
            learning_rate=pending.learning_rate,
            finite=all(math.isfinite(value) for value in (loss, norm) if value is not None),
            peak_allocated_bytes=None if math.isnan(allocated) else int(allocated),
            peak_reserved_bytes=None if math.isnan(reserved) else int(reserved),
            ended_at_seconds=self._ended_at_seconds,
            expert_load=expert_load,
            rank_load=rank_load,
            dropped=dropped,
        )


def rank_medians(own: Collection[float], device: torch.device) -> tuple[float, ...]:
    """Return the median of each rank's times, gathered once; empty where no rank has any. Every rank must call it."""
    median = torch.tensor([statistics.median(own) if own else 0.0], dtype=torch.float64).to(device)
    world = dist.get_world_size() if dist.is_initialized() else 1
    medians = [torch.empty_like(median) for _ in range(world)]
    if world > 1:
        dist.all_gather(medians, median)
    else:
        medians = [median]
    values = tuple(float(value.item()) for value in medians)
    return values if any(values) else ()


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _known_to_host(value: Any) -> float | None:
    """Return a number that is on the host, and leave one on the device there: fetching it would wait for the whole step."""
    if _is_on_device(value):
        return ON_DEVICE
    return None if value is None else float(value)


def _worst_memory(memory: PeakMemory | None, device: torch.device) -> Tensor:
    """Return the peak bytes of the worst rank. The all-reduce also ends the step when the slowest rank ends."""
    own = (memory.allocated, memory.reserved) if memory else (None, None)
    peaks = torch.tensor([math.nan if peak is None else peak for peak in own], dtype=torch.float64).to(device, non_blocking=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    return peaks


def _seconds_since(moment: str | None) -> float | None:
    """Return seconds by the wall clock, which launcher and workers share."""
    if moment is None:
        return None
    return (datetime.now(timezone.utc) - datetime.fromisoformat(moment)).total_seconds()


def _device(module: Any) -> torch.device:
    return torch.device(module.device)


def _output(outputs: Any, name: str, default: Any = None) -> Any:
    return outputs.get(name, default) if isinstance(outputs, Mapping) else default


def _number(trainer: Any, outputs: Any, name: str) -> Any:
    value = _output(outputs, name)
    return trainer.callback_metrics.get(name) if value is None else value


def _loss(trainer: Any, outputs: Any) -> Any:
    for name in LOSS_METRICS:
        if name in trainer.callback_metrics:
            return trainer.callback_metrics[name]
    return outputs if isinstance(outputs, Tensor) else _output(outputs, "loss")
