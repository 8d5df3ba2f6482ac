"""The machine as torch sees it from inside a rank."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tprimat.errors import LaunchError
from tprimat.records.environment import processor_name
from tprimat.records.schema import Machine


def describe_machine(nodes: int, gpus_per_node: int) -> Machine:
    """The accelerator of this rank, or the processor where there is none."""
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


def local_rank() -> int:
    """Of torchrun; 0 for a process that nobody started in a group."""
    return int(os.environ.get("LOCAL_RANK", "0"))


# When each step ended, on the device's own clock: events on a GPU, so that measuring stops nothing; host time on a CPU.


@dataclass(frozen=True, slots=True)
class Mark:
    """One moment on a device's stream."""

    event: Any
    """torch.cuda.Event, or None on a CPU."""
    host_seconds: float

    def wait(self) -> None:
        """Block this thread until the device has passed the moment."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: "Mark") -> float:
        """Device time between two moments that have both passed."""
        if self.event is None:
            return self.host_seconds - earlier.host_seconds
        return float(earlier.event.elapsed_time(self.event)) / 1e3


def mark(device: torch.device) -> Mark:
    """Note this moment in the device's work queue, without waiting for it."""
    if device.type != "cuda":
        return Mark(None, time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return Mark(event, time.perf_counter())


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes on this rank since the last reading."""

    allocated: int
    reserved: int


def read_peak_memory(device: torch.device) -> PeakMemory | None:
    """Read torch's allocator counters and start them anew: host-side numbers, the device is not asked. None on a CPU."""
    if device.type != "cuda":
        return None
    peak = PeakMemory(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    torch.cuda.reset_peak_memory_stats(device)
    return peak


# How much memory this rank's training takes, and how much it may take: a GPU's own counters, on a CPU those of Linux.

PROCESS = Path("/proc/self")
CGROUPS = Path("/sys/fs/cgroup")
KIBIBYTE = 1024


def start_peak(device: torch.device) -> None:
    """Forget earlier peaks, and give back what is cached for other shapes.

    Raises:
        LaunchError: this system does not tell what a process takes.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        (PROCESS / "clear_refs").write_text("5")  # proc(5): resets the peak resident set size
    except OSError as error:
        why = f"{PROCESS / 'clear_refs'}: {error.strerror}"
        raise LaunchError("A process's peak memory cannot be read here.", why=why, fix="--micro-batch-size 1") from error


def peak_bytes(device: torch.device) -> int:
    """Most that was allocated since `start_peak`; on a CPU, resident in this process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def available_bytes(device: torch.device, ranks_here: int) -> int:
    """What this rank's training takes now and could take besides.

    On a GPU that is all but what other processes and libraries beside torch's allocator hold; on a CPU an equal share of what the
    machine, and this process's cgroup, have left.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return _status("VmRSS") + host_bytes_left() // ranks_here


def host_bytes_left() -> int:
    """Main memory that programs can still have: the least that the machine and the limits on this process leave."""
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
    """This process's control group (version 2) and those above it, each of which may have a limit; without such, the root."""
    found = re.search(r"^0::(/.*)$", (PROCESS / "cgroup").read_text(encoding="utf8"), re.MULTILINE)
    own = CGROUPS / found[1].lstrip("/") if found else CGROUPS
    return [folder for folder in (own, *own.parents) if folder == CGROUPS or CGROUPS in folder.parents]


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", (PROCESS / "status").read_text(encoding="utf8"), re.MULTILINE)
    if found is None:
        raise LaunchError(f"{PROCESS / 'status'} does not tell {name}.", fix="--micro-batch-size 1")
    return int(found[1]) * KIBIBYTE


def _number(path: Path) -> int | None:
    """None where there is no such file, or no limit ("max")."""
    try:
        text = path.read_text(encoding="utf8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
