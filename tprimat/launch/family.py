"""Which processes belong to a run: all that descend from it, whatever session they moved to or whoever adopted them.

torchrun starts every rank in a session of its own (torch.distributed.elastic.multiprocessing.subprocess_handler), so a signal to
the process group of torchrun reaches no rank. A mark in the environment, which children inherit, finds them all, also after
their parents are gone; Jenkins' process tree killer works the same way. The parent relation finds those that
cleared their environment.
"""

import contextlib
import os
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
