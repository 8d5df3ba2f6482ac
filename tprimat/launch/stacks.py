"""Stacks of the processes of a hung run, before they are stopped, and the rank that the others wait for."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tprimat.launch import process_tree

PY_SPY_SECONDS_EACH = 10.0
PY_SPY_SECONDS_TOTAL = 30.0
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
"""As faulthandler prints it."""
PY_SPY_FRAME = re.compile(r"^\s+(?P<function>\S.*) \((?P<file>[^()]+):(?P<line>\d+)\)\s*$")
THREAD = re.compile(r"^\s*(?:Current thread|Thread) ")
STATES = {"T": "is stopped (SIGSTOP)", "D": "waits in the kernel, for a disk or a driver"}
"""Of a process, proc(5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One process of a run."""

    pid: int
    rank: int | None
    state: str
    """Its letter in proc(5)."""
    text: str
    """What py-spy or faulthandler printed; empty where it did not answer."""
    node: str = ""
    """Name of its node, where the run is on several."""

    @property
    def place(self) -> tuple[str, str, str] | None:
        """Function, file and line of its main thread."""
        sections: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if THREAD.match(line):
                sections.append((line, []))
            elif sections:
                sections[-1][1].append(line)
        named = [lines for head, lines in sections if "MainThread" in head]  # py-spy; faulthandler prints the main thread last
        for line in (named or [lines for _, lines in sections] or [[]])[-1]:
            if found := FRAME.search(line) or PY_SPY_FRAME.match(line):
                return found["function"], found["file"], found["line"]
        return None

    @property
    def waits_for_others(self) -> bool:
        """Whether it is in an operation of all ranks."""
        return self.place is not None and "torch/distributed" in self.place[1]


def take_stacks(pids: set[int], listen: Callable[[], str]) -> list[Stack]:
    """Return the Python stacks of a run's processes, with py-spy or, where that is missing, with faulthandler.

    Without py-spy, SIGUSR1 goes to one process after the other, if it handles it: our workers call faulthandler.register(SIGUSR1)
    and print their stacks, which `listen` reads. A process without a handler would die of the signal, so it does not get one.
    """
    py_spy = find_py_spy()
    began = time.monotonic()
    stacks = []
    for pid in sorted(pid for pid in pids if is_python(pid)):
        text = ""
        if time.monotonic() - began > PY_SPY_SECONDS_TOTAL:
            pass
        elif py_spy is not None:
            text = stack(py_spy, pid)
        elif state_of(pid) not in STATES and in_signal_set("SigCgt", pid, signal.SIGUSR1):
            process_tree.send({pid}, signal.SIGUSR1)
            text = listen()
        stacks.append(Stack(pid=pid, rank=rank_of(pid), state=state_of(pid), text=text))
    return stacks


def describe(stacks: Sequence[Stack]) -> str:
    """Return all stacks as text, rank by rank."""
    known = [each for each in stacks if each.text or each.state in STATES]
    return "\n".join(
        f"{name_of(each)}, process {each.pid}: {STATES.get(each.state, 'stack')}\n{each.text}"
        for each in sorted(known, key=lambda each: (each.rank is None, each.rank or 0, each.pid))
    )


def culprit(stacks: Sequence[Stack]) -> str | None:
    """Return one sentence on the rank that keeps the others waiting; None where the stacks do not show one."""
    ranks = list({each.rank: each for each in reversed(stacks) if each.rank is not None}.values())  # not their children
    for each in ranks:
        if each.state in STATES:
            where = f" on {each.node}" if each.node else ""
            return f"{name_of(each)} (process {each.pid}{where}) {STATES[each.state]}."
    known = [each for each in ranks if each.place is not None]
    if len(known) < 2 or len(known) < len(ranks):
        return None
    elsewhere = [each for each in known if not each.waits_for_others]
    if len(elsewhere) != 1:
        elsewhere = [each for each in known if sum(other.place == each.place for other in known) == 1]
        if len(elsewhere) != 1 or len({each.place for each in known}) != 2 or len(known) < 3:
            return None
    (odd,) = elsewhere
    function, file, line = odd.place or ("", "", "")
    return f"{name_of(odd)} is in {function} ({Path(file).name}:{line}), where no other rank is."


def name_of(each: Stack) -> str:
    """Return 'Rank 3', or 'No rank'."""
    return "No rank" if each.rank is None else f"Rank {each.rank}"


def rank_of(pid: int) -> int | None:
    """Return the rank that torchrun gave a process in its environment."""
    names = dict(word.partition(b"=")[::2] for word in process_tree.environment_of(pid))
    rank = names.get(b"RANK", b"")
    return int(rank) if rank.isdigit() and b"LOCAL_RANK" in names else None


def state_of(pid: int) -> str:
    """Return the letter of a process's state; empty where it has ended."""
    found = process_tree.find_process(pid)
    return "" if found is None else found.state


def find_py_spy() -> str | None:
    """Find py-spy on PATH, or next to this Python in an environment that is not activated."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def stack(py_spy: str, pid: int) -> str:
    """Return what py-spy prints about one process, errors included."""
    try:
        done = subprocess.run(
            [py_spy, "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=PY_SPY_SECONDS_EACH,
            check=False,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"Process {pid}: py-spy did not answer within {PY_SPY_SECONDS_EACH:g} s\n"
    except OSError as error:
        return f"Process {pid}: py-spy cannot be started: {error}\n"
    return done.stdout + done.stderr


def is_python(pid: int) -> bool:
    """Return whether the process runs a Python interpreter."""
    try:
        return "python" in (process_tree.PROC / str(pid) / "exe").readlink().name
    except OSError:
        return False


def in_signal_set(name: str, pid: int, number: int) -> bool:
    """Return whether a signal is in a set of a process's main thread: SigCgt, those that it handles, or SigBlk (proc(5))."""
    mask = re.search(rf"^{name}:\s*([0-9a-f]+)".encode(), process_tree.read_proc(pid, "status"), re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)
