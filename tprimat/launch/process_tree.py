"""Find and stop all processes of a run, in any session and under any parent; count what the kernel killed for memory.

torchrun starts every rank in its own session (torch.distributed.elastic.multiprocessing.subprocess_handler), so a signal to
torchrun's process group reaches no rank. A marker in the environment, which children inherit, identifies them even after their
parents are gone; Jenkins' process tree killer works the same way. The parent relation finds those that cleared their environment.
"""

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MARKER = "TPRIMAT_LAUNCH"
"""Environment variable with the same value in all processes of a run."""
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
SIGKILL_TIMEOUT_SECONDS = 3.0
"""How long to repeat SIGKILL before giving up on a process."""
CHECK_INTERVAL_SECONDS = 0.1


def read_proc(pid: int, name: str) -> bytes:
    """Return a file of a process in /proc; empty where the process is gone or another user's."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def environment_of(pid: int) -> list[bytes]:
    """Return the NAME=VALUE words that a process was started with."""
    return read_proc(pid, "environ").split(b"\0")


@dataclass(frozen=True, slots=True)
class Process:
    """One row of the process table."""

    state: str
    """Its letter in proc(5)."""
    parent: int
    session: int


def find_process(pid: int) -> Process | None:
    """Return the row of a process; None where it has ended."""
    text = read_proc(pid, "stat").decode("utf8", errors="replace")
    if not text:
        return None
    # The name is in parentheses and may contain any character; proc(5).
    state, parent, _group, session = text[text.rfind(")") + 2 :].split()[:4]
    return Process(state, int(parent), int(session))


def process_table() -> dict[int, Process]:
    """Return all processes by pid; empty where there is no /proc (macOS)."""
    pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()] if PROC.is_dir() else []
    return {pid: found for pid in pids if (found := find_process(pid)) is not None}


def members(marker: str, root: int | None) -> set[int]:
    """Return the pids of a run's living processes, without zombies and without the caller.

    Args:
        marker: value of MARKER that the run was started with.
        root: pid of the first process until it has been reaped, then None.
    """
    table = process_table()
    if not table:
        return {root} if root is not None and alive(root) else set()
    word = f"{MARKER}={marker}".encode()
    found = {pid for pid, p in table.items() if (root is not None and root in (pid, p.session)) or word in environment_of(pid)}
    while children := {pid for pid, p in table.items() if p.parent in found} - found:
        found |= children
    return {pid for pid in found if table[pid].state not in "ZX"} - {os.getpid()}


def alive(pid: int) -> bool:
    """Return whether a process with this pid exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def send(pids: set[int], number: int) -> None:
    """Signal processes; skip those that are gone or belong to another user."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def send_group(leader: int, number: int) -> None:
    """Signal a process group in one call, so that no member can fork away in between."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def remove_leftovers(root: int) -> None:
    """Remove the folder of logs that a killed torchrun left in the temporary folder (rendezvous.py)."""
    with contextlib.suppress(OSError):  # no temporary folder can be written
        for folder in Path(tempfile.gettempdir()).glob(f"tprimat-torchrun-{root}-*"):
            shutil.rmtree(folder, ignore_errors=True)


class Shutdown:
    """A shutdown in progress: call `advance` until it returns True.

    The caller must go on reading the run's output meanwhile, because a process that blocks on a full pipe cannot end.

    SIGTERM goes to the process group of the root, which is what torchrun and shell scripts expect: they forward it to their ranks
    and wait. All remaining processes get SIGTERM after half of the grace period, or as soon as the root has ended. After the
    grace period they get SIGKILL, repeatedly. A process that survives SIGKILL for SIGKILL_TIMEOUT_SECONDS (it waits in a driver,
    or belongs to another user) is listed in `survivors`.
    """

    def __init__(self, marker: str, root: Callable[[], int | None], grace_seconds: float) -> None:
        self._marker = marker
        self._root = root
        self._grace_seconds = grace_seconds
        self._began = time.monotonic()
        self._sent_to_all = False
        self._killed_at: float | None = None
        self._next_check = 0.0
        self.survivors: set[int] = set()
        leader = root()
        if leader is not None:
            send_group(leader, signal.SIGTERM)

    def kill(self) -> None:
        """End the grace period now."""
        self._grace_seconds = 0.0
        self._next_check = 0.0

    def advance(self) -> bool:
        """Send the signals that are due; return True when no process is left, or when the survivors cannot be killed."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + CHECK_INTERVAL_SECONDS
        root = self._root()
        remaining = members(self._marker, root)
        if not remaining:
            return True
        age = now - self._began
        if age >= self._grace_seconds:
            send(remaining, signal.SIGKILL)
            self._killed_at = self._killed_at or now
            if now - self._killed_at > SIGKILL_TIMEOUT_SECONDS:
                self.survivors = remaining
                return True
        elif not self._sent_to_all and (root is None or age >= self._grace_seconds / 2):
            self._sent_to_all = True
            send(remaining, signal.SIGTERM)
        return False


def count_oom_kills() -> int | None:
    """Count the kernel's out-of-memory kills so far, since SIGKILL leaves no trace in the log.

    Returns:
        the sum for our cgroup (memory.events of cgroups v2) and the machine (/proc/vmstat); None if neither is available.
    """
    counts = [count for path in oom_counters() if (count := read_oom_count(path)) is not None]
    return sum(counts) if counts else None


def oom_counters() -> list[Path]:
    """Return the files that may contain a count."""
    files = [Path("/proc/vmstat"), CGROUPS / "memory.events"]
    try:
        group = Path("/proc/self/cgroup").read_text(encoding="utf8")
    except OSError:
        return files
    own = re.search(r"^0::/(.+)$", group, re.MULTILINE)
    return [*files, CGROUPS / own[1] / "memory.events"] if own else files


def read_oom_count(path: Path) -> int | None:
    """Read the count from one file; None if there is none."""
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(encoding="utf8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[1]) if found else None
