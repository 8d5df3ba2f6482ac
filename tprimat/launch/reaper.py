"""A process that outlives the launcher by a few seconds and ends the run when the launcher is killed with SIGKILL.

prctl(PR_SET_PDEATHSIG) would reach the first process only, and only by a signal that it may ignore; ranks that torchrun put into
sessions of their own would stay on the GPUs. The guard holds the reading end of a pipe: the kernel closes the other end when the
launcher dies, however it dies.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from tprimat.launch.process_tree import Stop, alive, members

START = "import sys; sys.path.insert(0, sys.argv[1]); from tprimat.launch.reaper import main; main()"
DONE = b"\n"


class Guard:
    """The launcher's end of it."""

    def __init__(self, mark: str, root: int, grace_seconds: float) -> None:
        reading, self._writing = os.pipe()
        package_root = str(Path(__file__).parents[2])
        # -I and -S: no user site, no PYTHON* variables, a quick start. In a session of its own no signal to our group hits it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, package_root, str(reading), mark, str(root), str(grace_seconds)],
            pass_fds=(reading,),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reading)

    def dismiss(self) -> None:
        """The run has ended, nothing is left to guard."""
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard
            os.write(self._writing, DONE)
        os.close(self._writing)
        self._process.wait()


def main() -> None:
    """Wait for the launcher's word or its death."""
    reading, mark, root, grace = sys.argv[2:6]
    if os.read(int(reading), 1) == DONE:
        return
    first = int(root)

    def leader() -> int | None:
        return first if alive(first) and first in members(mark, first) else None

    stop = Stop(mark, leader, float(grace))
    while not stop.advance():
        time.sleep(0.05)
