"""Which processes belong to a run: all that descend from it, whatever session they moved to or whoever adopted them.

torchrun starts every rank in a session of its own (torch.distributed.elastic.multiprocessing.subprocess_handler), so a signal to
the process group of torchrun reaches no rank. A mark in the environment, which children inherit, finds them all, also after
their parents are gone; Jenkins' process tree killer works the same way. The parent relation finds those that
cleared their environment.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MARK = "TPRIMAT_LAUNCH"
"""Environment variable that carries the run's mark. It says who belongs together and nothing else."""
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    session: int
    zombie: bool


def process_table() -> dict[int, Process]:
    """All processes, by pid; empty where there is no /proc (macOS)."""
    table = {}
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(encoding="utf8", errors="replace")
        except OSError:  # it ended while we looked
            continue
        # The name stands in parentheses and may hold any character; proc(5).
        state, parent, _group, session = text[text.rfind(")") + 2 :].split()[:4]
        pid = int(entry.name)
        table[pid] = Process(pid, int(parent), int(session), state in "ZX")
    return table


def carries(pid: int, mark: str) -> bool:
    """Whether the environment that the process was started with has the mark."""
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except OSError:  # gone, or another user's
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")


def members(mark: str, root: int | None) -> set[int]:
    """The living processes of a run.

    Args:
        mark: value of MARK that the run was started with.
        root: pid of the first process while nobody has reaped it, else None.

    Returns:
        pids, without zombies and without the caller.
    """
    table = process_table()
    if not table:
        return {root} if root is not None and alive(root) else set()
    found = {p.pid for p in table.values() if (root is not None and root in (p.pid, p.session)) or carries(p.pid, mark)}
    while grown := {p.pid for p in table.values() if p.parent in found} - found:
        found |= grown
    return {pid for pid in found if not table[pid].zombie} - {os.getpid()}


def alive(pid: int) -> bool:
    """Whether a process with this pid exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def send(pids: set[int], number: int) -> None:
    """Signal processes; those that are gone, or not ours, are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def send_group(leader: int, number: int) -> None:
    """Signal a process group in one call, so that no member can fork away in between."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


PATIENCE_SECONDS = 3.0
"""With the process that SIGKILL does not end."""


class Stop:
    """A stop under way. The caller goes on reading the run's output meanwhile: a process that blocks on a full pipe cannot end.

    SIGTERM goes to the first process's group, which is what torchrun and shell scripts expect: they pass it on to their ranks and
    wait for them. Whoever is left at half of the grace, or after the first process has ended, gets it directly; whoever is left
    at the end of the grace gets SIGKILL, again and again until nobody is left. A process that even SIGKILL does not end (it waits
    in a driver, or belongs to another user) is given up after PATIENCE_SECONDS, and named.
    """

    def __init__(self, mark: str, root: Callable[[], int | None], grace_seconds: float) -> None:
        self._mark = mark
        self._root = root
        self._grace = grace_seconds
        self._began = time.monotonic()
        self._asked_all = False
        self._killed_at: float | None = None
        self.given_up: set[int] = set()
        """Whoever is still there at the end."""
        self._look_again = 0.0
        leader = root()
        if leader is not None:
            send_group(leader, signal.SIGTERM)

    def kill(self) -> None:
        """End the patience: SIGKILL from now on."""
        self._grace = 0.0
        self._look_again = 0.0

    def advance(self) -> bool:
        """Do what is due; True when no process is left, or nothing more can be done."""
        now = time.monotonic()
        if now < self._look_again:
            return False
        self._look_again = now + 0.1
        root = self._root()
        left = members(self._mark, root)
        if not left:
            return True
        age = now - self._began
        if age >= self._grace:
            send(left, signal.SIGKILL)
            self._killed_at = self._killed_at or now
            if now - self._killed_at > PATIENCE_SECONDS:
                self.given_up = left
                return True
        elif not self._asked_all and (root is None or age >= self._grace / 2):
            self._asked_all = True
            send(left, signal.SIGTERM)
        return False
