"""What a rank knows of itself and tells: its machine, its clock and memory, the record of its run, and the lines of the log."""

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from tprimat.core.accelerators import recorded_name
from tprimat.core.errors import RecordError
from tprimat.core.flops import flop_per_token
from tprimat.core.workload import Workload
from tprimat.plan.schema import RunPlan, mismatches
from tprimat.records.environment import node_record, processor_name, software_versions
from tprimat.records.schema import Evidence, Machine, NodeRecord, Outcome, RunRecord, StepRecord
from tprimat.records.store import RUN_LINE, RunDirectory, to_json
from tprimat.train import startup
from tprimat.train.compat import LIGHTNING
from tprimat.train.profiler import slowed_steps


def describe_machine(nodes: int, gpus_per_node: int) -> Machine:
    """Return the accelerator of this rank, or the processor where there is none."""
    if not torch.cuda.is_available():
        return Machine(platform="cpu", accelerator=processor_name(), gpus_per_node=gpus_per_node, nodes=nodes)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine(
        platform="rocm" if torch.version.hip else "cuda",
        accelerator=recorded_name(properties.name, properties.total_memory),
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        memory_bytes=properties.total_memory,
    )


def this_node(machine: Machine) -> NodeRecord:
    """Return this machine as one of the nodes of a run."""
    return node_record(machine, None if machine.platform == "cpu" else torch.cuda.device_count())


def local_rank() -> int:
    """Return torchrun's local rank; 0 for a process outside torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


# Timestamps on the device's own clock: events on a GPU, so that measuring stops nothing; host time on a CPU.


@dataclass(frozen=True, slots=True)
class Timestamp:
    """One moment on a device's stream."""

    event: Any
    """torch.cuda.Event, or None on a CPU."""
    host_seconds: float

    def wait(self) -> None:
        """Block this thread until the device has passed the moment."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: "Timestamp") -> float:
        """Device time between two moments that have both passed."""
        if self.event is None:
            return self.host_seconds - earlier.host_seconds
        return float(earlier.event.elapsed_time(self.event)) / 1e3


def record_timestamp(device: torch.device) -> Timestamp:
    """Note this moment in the device's work queue, without waiting for it."""
    if device.type != "cuda":
        return Timestamp(None, time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return Timestamp(event, time.perf_counter())


# How much memory this rank's training takes: torch's counters on a GPU, those of Linux on a CPU.

PROCESS = Path("/proc/self")


def read_peak_memory(device: torch.device) -> tuple[int | None, int | None]:
    """Read and reset the peak bytes of this rank, allocated and reserved; on a CPU the resident ones. None: not counted."""
    if device.type == "cuda":
        peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peaks
    try:
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", (PROCESS / "status").read_text(encoding="utf8"), re.MULTILINE)
        (PROCESS / "clear_refs").write_text("5")  # proc(5)
    except OSError:
        return None, None
    return int(peak[1]) * 1024 if peak else None, None


# The record of a run, as it starts, trains and ends.


def launched_record(plan: RunPlan) -> RunRecord:
    """Return the launcher's record, or a new one, with torch's accelerator: the driver may count GPUs otherwise."""
    machine = describe_machine(plan.nodes, plan.gpus_per_node)
    try:
        record = RunDirectory(Path(plan.run_directory)).read_run()
    except RecordError:
        return plan.begun_on(machine)
    seen, nodes = record.machine, record.nodes
    if len(nodes) == 1:
        nodes = (replace(nodes[0], accelerator=machine.accelerator, memory_bytes=machine.memory_bytes),)
    return replace(
        record,
        machine=replace(machine, power_limit_watts=seen.power_limit_watts, driver=seen.driver),
        nodes=nodes,
        start_up=startup.seconds_since(record.started_at) if record.started_at else {},
    )


def note_ended(
    directory: RunDirectory, outcome: Outcome = "completed", cause: str | None = None, steps: int | None = None
) -> None:
    """Write how the run ended; if our launcher runs, it later writes the final outcome."""
    ended_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    directory.write_run(replace(directory.read_run(), outcome=outcome, cause=cause, ended_at=ended_at, steps_recorded=steps))


def running_record(plan: RunPlan, evidence: Evidence, options: dict[str, Any], ignored: Iterable[str] = ()) -> RunRecord:
    """Return the record of a run that trains, with its evidence and resolved options; `ignored` settings do not run."""
    return replace(
        launched_record(plan),
        software=software_versions(),
        profiled_steps=slowed_steps(plan, options.get("cuda_graphs") is True),
        evidence=evidence,
        engine_options=options,
        mismatches=(*mismatches(plan, evidence), *ignored),
    )


class AnyTrainer:
    """Describes a run of any Lightning Trainer, from what the Trainer knows; the start is noted once."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.started_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")

    def describe(self, trainer: Any, pl_module: Any) -> RunRecord:
        """Return machine, software, the module's name and the Trainer's dtype. Layout and batch are unknown and stay absent."""
        nodes = int(trainer.num_nodes)
        return RunRecord(
            run_id=self.run_id,
            model=type(pl_module).__name__,
            strategy=None,
            engine=LIGHTNING,
            workload=Workload(matmul_dtype=requested_dtype(str(trainer.precision))),
            machine=(machine := describe_machine(nodes, max(1, int(trainer.world_size) // nodes))),
            nodes=(this_node(machine),) if nodes == 1 else (),
            software=software_versions(),
            started_at=self.started_at,
            clock="step_end",
            outcome="running",
        )


def requested_dtype(precision: str) -> str | None:
    """Return the dtype of the matmuls under a Trainer's precision, such as bf16-mixed; None where it does not say."""
    if precision.startswith("32"):
        # The older question raises an error where the newer setting was used (torch 2.9).
        setting = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
        in_tf32 = torch.get_float32_matmul_precision() != "highest" if setting is None else setting == "tf32"
        return "tf32" if torch.cuda.is_available() and in_tf32 else "fp32"
    return {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}.get(precision)


# The log: each step as Megatron-LM prints it, after one line with the record of the run.
#
# Megatron-LM's wording (training_log in megatron/training/training.py) is what `tail -f`, grep and other tools know.
# tprimat/logs/formats/megatron.py reads both kinds of lines back.


class StepLog:
    """Write the lines of one run to stdout. Only rank 0 calls it."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan

    def start(self, run: RunRecord) -> None:
        """Print the record, so that the log alone says what ran."""
        print(RUN_LINE + to_json(run), flush=True)  # noqa: T201

    def step(self, step: StepRecord) -> None:
        """Print one step."""
        print(iteration_line(self._plan, step, datetime.now()), flush=True)  # noqa: T201

    def end(self) -> None:
        """Print that training is done."""
        print(f"[after training is done] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}", flush=True)  # noqa: T201


def iteration_line(plan: RunPlan, step: StepRecord, now: datetime) -> str:
    """Format one step, so that what is read back equals the record: milliseconds with four decimals, memory in bytes.

    TFLOP/s count half the attention square (`causal`). A value that the step does not have is left out.
    """
    work = plan.workload
    flop = (step.tokens or 0) * flop_per_token(work.shape, work.sequence_tokens, dropped=step.dropped or 0.0)
    values: tuple[tuple[str, float | None, str], ...] = (
        ("consumed samples", step.step * work.global_batch_sequences, "12d"),
        ("elapsed time per iteration (ms)", step.step_seconds * 1e3, ".4f"),
        ("throughput per GPU (TFLOP/s/GPU)", flop / step.step_seconds / work.layout.world_size / 1e12 or None, ".5g"),
        ("learning rate", step.learning_rate, ".6E"),
        ("global batch size", work.global_batch_sequences, "5d"),
        ("lm loss", step.loss, ".6E"),
        ("grad norm", step.grad_norm, ".7g"),
        ("number of skipped iterations", 0, "3d"),
        ("number of nan iterations", not step.finite, "3d"),
        ("mem-max-allocated-bytes", step.peak_allocated_bytes, "d"),
        ("mem-max-reserved-bytes", step.peak_reserved_bytes, "d"),
    )
    shown = "".join(f" {name}: {value:{form}} |" for name, value, form in values if value is not None)
    return f" [tprimat {now:%Y-%m-%d %H:%M:%S.%f}] iteration {step.step:8d}/{plan.steps:8d} |{shown}"
