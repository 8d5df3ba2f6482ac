"""How much memory this rank's training takes, and how much it may take: a GPU's own counters, on a CPU those of Linux."""

import re
from pathlib import Path

import torch

from tprimat.errors import LaunchError

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
