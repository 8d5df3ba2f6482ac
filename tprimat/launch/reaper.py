"""Stop the run from a small helper process if the launcher itself is killed with SIGKILL.

prctl(PR_SET_PDEATHSIG) would reach the first process only, with a signal that it may ignore; ranks in sessions of their own
would stay on the GPUs. The reaper reads from a pipe whose other end the kernel closes when the launcher dies, however it dies. It
starts before the run, or a launcher that is killed between the two would leave the run behind.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from tprimat.launch.process_tree import Shutdown, members, remove_leftovers

START = "import sys; sys.path.insert(0, sys.argv[1]); from tprimat.launch.reaper import main; main()"
DISMISSED = b"."


class Reaper:
    """The launcher's handle on the helper process."""

    def __init__(self, marker: str, grace_seconds: float) -> None:
        reading, self._writing = os.pipe()
        package_root = str(Path(__file__).parents[2])
        # -I and -S skip PYTHON* variables and site-packages, for a quick start. In its own session, signals to our group miss it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, package_root, str(reading), marker, str(grace_seconds)],
            pass_fds=(reading,),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reading)

    def tell(self, root: int) -> None:
        """Name the first process of the run, whose process group is asked to stop first."""
        self._write(f"{root}\n".encode())

    def dismiss(self) -> None:
        """End the helper: the run has ended, or did not start."""
        self._write(DISMISSED)
        self.release()

    def release(self) -> None:
        """Let the helper stop the run, and wait until it has."""
        os.close(self._writing)
        self._process.wait()

    def _write(self, words: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the helper itself was killed
            os.write(self._writing, words)


def main() -> None:
    """Wait until the launcher dismisses us or dies; stop the run if it died."""
    reading, marker, grace = sys.argv[2:5]
    told = b""
    while words := os.read(int(reading), 64):
        told += words
        if told.endswith(DISMISSED):
            return
    first = int(told) if told.endswith(b"\n") else None

    def leader() -> int | None:
        return first if first is not None and first in members(marker, first) else None

    shutdown = Shutdown(marker, leader, float(grace))
    while not shutdown.advance():
        time.sleep(0.05)
    if first is not None:
        remove_leftovers(first)
