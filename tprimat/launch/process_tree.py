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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

MARKER = "TPRIMAT_LAUNCH"
"""Environment variable with the same value in all processes of a run."""
PROC = Path("/proc")
SIGKILL_TIMEOUT_SECONDS = 3.0
CHECK_INTERVAL_SECONDS = 0.1


def read_proc(pid: int, name: str) -> bytes:
    """Return a file of a process in /proc; empty where the process is gone or another user's."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def stat_of(pid: int) -> tuple[str, int, int]:
    """Return the letter of a process's state, its parent and its session; X where it has ended, as in proc(5)."""
    # The name is in parentheses and may contain any character.
    words = read_proc(pid, "stat").decode("utf8", errors="replace").rpartition(")")[2].split()
    if not words:
        return "X", 0, 0
    state, threads = words[0], int(words[17])
    return "D" if state == "Z" and threads > 1 else state, int(words[1]), int(words[3])  # its main thread alone has ended


def rank_of(pid: int) -> int | None:
    """Return the rank that torchrun gave a process in its environment."""
    names = dict(word.partition(b"=")[::2] for word in read_proc(pid, "environ").split(b"\0"))
    rank = names.get(b"RANK", b"")
    return int(rank) if rank.isdigit() and b"LOCAL_RANK" in names else None


def in_signal_set(name: str, pid: int, number: int) -> bool:
    """Return whether a signal is in a set of a process's main thread: SigCgt, those that it handles, or SigBlk (proc(5))."""
    mask = re.search(rf"^{name}:\s*([0-9a-f]+)".encode(), read_proc(pid, "status"), re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def members(marker: str, root: int | None) -> set[int]:
    """Return the pids of a run's living processes, without the caller, by its MARKER; `root` is the first, until it is reaped."""
    table = {int(entry.name): stat_of(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit()}
    word = f"{MARKER}={marker}".encode()
    pids = {
        pid
        for pid, (_, _, session) in table.items()
        if (root is not None and root in (pid, session)) or word in read_proc(pid, "environ").split(b"\0")
    }
    while children := {pid for pid, (_, parent, _) in table.items() if parent in pids} - pids:
        pids |= children
    return {pid for pid in pids if table[pid][0] not in "ZX"} - {os.getpid()}


def send(pids: set[int], number: int) -> None:
    """Signal processes; skip those that are gone or belong to another user."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def remove_leftovers(root: int) -> None:
    """Remove the folder of logs that a killed torchrun left in the temporary folder (rendezvous.py)."""
    with contextlib.suppress(OSError):  # no temporary folder can be written
        for folder in Path(tempfile.gettempdir()).glob(f"tprimat-torchrun-{root}-*"):
            shutil.rmtree(folder, ignore_errors=True)


class Shutdown:
    """A shutdown in progress: call `advance` until it returns True, and read the run's output meanwhile, so that nobody blocks.

    SIGTERM goes to the process group of the root, which torchrun and shell scripts forward to their ranks. All remaining
    processes get SIGTERM after half of the grace period, or as soon as the root has ended. After the grace period they get
    SIGKILL, repeatedly. One that survives it for SIGKILL_TIMEOUT_SECONDS (it waits in a driver) is given up.
    """

    def __init__(self, marker: str, root: Callable[[], int | None], grace_seconds: float) -> None:
        self._marker = marker
        self._root = root
        self._grace_seconds = grace_seconds
        self._began = time.monotonic()
        self._sent_to_all = False
        self._killed_at: float | None = None
        self._next_check = 0.0
        if (leader := root()) is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGTERM)  # in one call, so that no member can fork away in between

    def kill(self) -> None:
        """End the grace period now."""
        self._grace_seconds = self._next_check = 0.0

    def advance(self) -> bool:
        """Send the signals that are due; return True when no process is left, or none that can be killed."""
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
            return now - self._killed_at > SIGKILL_TIMEOUT_SECONDS
        if not self._sent_to_all and (root is None or age >= self._grace_seconds / 2):
            self._sent_to_all = True
            send(remaining, signal.SIGTERM)
        return False


def count_oom_kills(root: Path = Path("/")) -> int:
    """Count the kernel's out-of-memory kills in this process's cgroup so far; of the whole machine where no cgroup counts."""
    text = (root / "proc" / "self" / "cgroup").read_text(encoding="utf8") if (root / "proc" / "self" / "cgroup").exists() else ""
    second, first = ((match[1] if (match := re.search(rf"^\d+:{name}:/(.*)$", text, re.M)) else "") for name in ("", "memory"))
    groups = root / "sys" / "fs" / "cgroup"
    files = [groups / second / "memory.events", groups / "memory.events"]
    files += [groups / "memory" / first / "memory.oom_control", groups / "memory" / "memory.oom_control"]
    for file in (*files, root / "proc" / "vmstat"):
        with contextlib.suppress(OSError):
            if counter := re.search(r"^oom_kill (\d+)$", file.read_text(encoding="utf8"), re.MULTILINE):
                return int(counter[1])
    return 0


# A small helper process that stops the run if the launcher itself is killed with SIGKILL.


START = "import sys; sys.path.insert(0, sys.argv[1]); from tprimat.launch.process_tree import main; main()"
DISMISSED = b"."


class Reaper:
    """The launcher's handle on the helper process, whose input ends when the launcher does."""

    def __init__(self, marker: str, grace_seconds: float) -> None:
        # -I and -S skip PYTHON* variables and site-packages, for a quick start. In its own session, signals to our group miss it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, str(Path(__file__).parents[2]), marker, str(grace_seconds)],
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def tell(self, root: int) -> None:
        """Name the first process of the run, whose process group is asked to stop first."""
        self._write(f"{root}\n".encode())

    def dismiss(self) -> None:
        """End the helper: the run has ended, or did not start."""
        self._write(DISMISSED)
        self.release()

    def release(self) -> None:
        """Let the helper stop the run, and wait until it has."""
        self._process.communicate()

    def _write(self, words: bytes) -> None:
        pipe = cast("BinaryIO", self._process.stdin)  # not None with stdin=PIPE
        with contextlib.suppress(BrokenPipeError):  # the helper itself was killed
            pipe.write(words)
            pipe.flush()


def main() -> None:
    """Wait until the launcher dismisses us or dies; stop the run if it died."""
    marker, grace = sys.argv[2:4]
    told = sys.stdin.buffer.read()
    if told.endswith(DISMISSED):
        return
    first = int(told) if told else None

    def leader() -> int | None:
        return first if first is not None and first in members(marker, first) else None

    shutdown = Shutdown(marker, leader, float(grace))
    while not shutdown.advance():
        time.sleep(0.05)
    if first is not None:
        remove_leftovers(first)
