"""The machine as a rank sees it: its accelerator, timestamps on its clock, and memory."""

import contextlib
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tprimat.core.errors import LaunchError
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


# How much memory this rank's training takes, and how much it may take: torch's counters on a GPU, those of Linux on a CPU.

PROCESS = Path("/proc/self")
CGROUPS = Path("/sys/fs/cgroup")
KIBIBYTE = 1024


def read_peak_memory(device: torch.device) -> tuple[int | None, int | None]:
    """Read and reset the peak bytes of this rank, allocated and reserved, without waiting for the device.

    On a CPU nothing is reserved, and what is allocated is resident in this process; None where the system does not count it.
    Where it counts but does not reset, each reading is the peak since the process began.
    """
    if device.type == "cuda":
        peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peaks
    try:
        peak = _status("VmHWM")
    except (LaunchError, OSError):
        return None, None
    with contextlib.suppress(OSError):
        _reset_resident_peak()
    return peak, None


def reset_peak(device: torch.device) -> None:
    """Forget earlier peaks, and give back what is cached for other shapes.

    Raises:
        LaunchError: this system does not report the memory of a process.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _reset_resident_peak()
    except OSError as error:
        why = f"{PROCESS / 'clear_refs'}: {error.strerror}"
        raise LaunchError("A process's peak memory cannot be read here.", why=why, fix="--micro-batch-size 1") from error


def _reset_resident_peak() -> None:
    (PROCESS / "clear_refs").write_text("5")  # proc(5)


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes allocated since `reset_peak`; on a CPU, resident in this process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def available_bytes(device: torch.device, ranks_here: int) -> int:
    """Return the bytes that this rank's training takes now plus those it could still take.

    On a GPU this is everything that other processes, and libraries outside torch's allocator, do not hold. On a CPU it is an
    equal share of what the machine and this process's cgroup have left.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return _status("VmRSS") + host_bytes_left() // ranks_here


def host_bytes_left() -> int:
    """Return the main memory still available: the least of what the machine and the limits on this process leave."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(encoding="utf8"), re.MULTILINE)
    left = [int(found[1]) * KIBIBYTE] if found else []
    for folder in own_cgroups():
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            left.append(limit - used)
    if not left:
        raise LaunchError("The memory of this machine cannot be read.", where="/proc/meminfo", fix="--micro-batch-size 1")
    return max(0, min(left))


def own_cgroups() -> list[Path]:
    """Return this process's control group (version 2) and its parents, each of which may have a limit; the root without one."""
    found = re.search(r"^0::(/.*)$", (PROCESS / "cgroup").read_text(encoding="utf8"), re.MULTILINE)
    own = CGROUPS / found[1].lstrip("/") if found else CGROUPS
    return [folder for folder in (own, *own.parents) if folder == CGROUPS or CGROUPS in folder.parents]


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", (PROCESS / "status").read_text(encoding="utf8"), re.MULTILINE)
    if found is None:
        raise LaunchError(f"{PROCESS / 'status'} has no {name}.", fix="--micro-batch-size 1")
    return int(found[1]) * KIBIBYTE


def _number(path: Path) -> int | None:
    """Return the number in a file; None where there is no such file, or no limit ("max")."""
    try:
        text = path.read_text(encoding="utf8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
