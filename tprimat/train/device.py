"""The machine as a rank sees it: its accelerator, timestamps on its clock, and memory."""

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tprimat.records.environment import processor_name, usable_cores
from tprimat.records.schema import Machine, NodeRecord


def describe_machine(nodes: int, gpus_per_node: int) -> Machine:
    """Return the accelerator of this rank, or the processor where there is none."""
    if not torch.cuda.is_available():
        return Machine(platform="cpu", accelerator=processor_name(), gpus_per_node=gpus_per_node, nodes=nodes)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine(
        platform="rocm" if torch.version.hip else "cuda",
        accelerator=properties.name,
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        memory_bytes=properties.total_memory,
    )


def this_node(machine: Machine) -> NodeRecord:
    """Return this machine as one of the nodes of a run."""
    gpus = None if machine.platform == "cpu" else torch.cuda.device_count()
    return NodeRecord(
        host=socket.gethostname(),
        accelerator=machine.accelerator,
        gpus=gpus,
        memory_bytes=machine.memory_bytes,
        processor=processor_name(),
        cores=usable_cores(),
    )


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
    """Read and reset the peak bytes of this rank, allocated and reserved, without waiting for the device.

    On a CPU nothing is reserved, and what is allocated is resident in this process; None where the system does not count it.
    """
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
