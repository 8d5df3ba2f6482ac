"""Stacks of the processes of a hung run, before they are stopped, and the rank that the others wait for."""

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tprimat.launch import process_tree

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
"""As faulthandler prints it."""
THREAD = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)
STATES = {"T": "is stopped (SIGSTOP)", "D": "waits in the kernel, for a disk or a driver"}
"""Of a process, proc(5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One rank of a run."""

    pid: int
    rank: int
    state: str
    """Its letter in proc(5)."""
    text: str
    """What faulthandler printed; empty where it did not answer."""

    @property
    def place(self) -> tuple[str, str, str] | None:
        """Function, file and line of its main thread, which faulthandler prints last."""
        found = FRAME.search(THREAD.split(self.text)[-1])
        return (found["function"], found["file"], found["line"]) if found else None


def take_stacks(pids: set[int], listen: Callable[[], str]) -> list[Stack]:
    """Return the Python stacks of the ranks among some processes.

    SIGUSR1 goes to one after the other, if it handles it: our workers call faulthandler.register(SIGUSR1) and print their stacks,
    which `listen` reads. A process without a handler would die of the signal, so it does not get one.
    """
    stacks: dict[int, Stack] = {}
    for pid in sorted(pids):
        rank, state, text = process_tree.rank_of(pid), process_tree.state_of(pid), ""
        if rank is None or rank in stacks:  # a child of a rank has its number, too
            continue
        if state not in STATES and process_tree.in_signal_set("SigCgt", pid, signal.SIGUSR1):
            process_tree.send({pid}, signal.SIGUSR1)
            text = listen()
        stacks[rank] = Stack(pid=pid, rank=rank, state=state, text=text)
    return [stacks[rank] for rank in sorted(stacks)]


def save(stacks: Sequence[Stack], path: Path) -> str:
    """Write the stacks into a file, and return a sentence on it; empty where there is none."""
    lines = (f"Rank {one.rank}, process {one.pid}: {STATES.get(one.state, 'stack')}\n{one.text}" for one in stacks if one.text)
    if not (text := "\n".join(lines)):
        return ""
    try:
        path.write_text(text, encoding="utf8")
    except OSError as error:
        return f"The stacks cannot be written to {path}: {error.strerror or error}."
    return f"The stacks of {len(stacks)} ranks are in {path}."


def culprit(stacks: Sequence[Stack]) -> str | None:
    """Return one sentence on the rank that keeps the others waiting; None where the stacks do not show one."""
    for one in stacks:
        if one.state in STATES:
            return f"Rank {one.rank} (process {one.pid}) {STATES[one.state]}."
    places = {one.rank: one.place for one in stacks if one.place}
    elsewhere = [rank for rank, (_, file, _) in places.items() if "torch/distributed" not in file]
    if len(elsewhere) != 1 or len(places) < max(2, len(stacks)):
        return None
    function, file, line = places[elsewhere[0]]
    return f"Rank {elsewhere[0]} is in {function} ({Path(file).name}:{line}), where no other rank is."
