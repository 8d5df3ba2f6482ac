"""Ending a run: ask, wait, insist, and leave nobody behind."""

import signal
import time
from collections.abc import Callable

from tprimat.launch import family


class Stop:
    """A stop under way. The caller goes on reading the run's output meanwhile: a process that blocks on a full pipe cannot end.

    SIGTERM goes to the first process's group, which is what torchrun and shell scripts expect: they pass it on to their ranks and
    wait for them. Whoever is left at half of the grace, or after the first process has ended, gets it directly; whoever is left
    at the end of the grace gets SIGKILL, again and again until nobody is left.
    """

    def __init__(self, mark: str, root: Callable[[], int | None], grace_seconds: float) -> None:
        self._mark = mark
        self._root = root
        self._grace = grace_seconds
        self._began = time.monotonic()
        self._asked_all = False
        self._look_again = 0.0
        leader = root()
        if leader is not None:
            family.send_group(leader, signal.SIGTERM)

    def kill(self) -> None:
        """End the patience: SIGKILL from now on."""
        self._grace = 0.0
        self._look_again = 0.0

    def advance(self) -> bool:
        """Do what is due; True when no process is left."""
        now = time.monotonic()
        if now < self._look_again:
            return False
        self._look_again = now + 0.1
        root = self._root()
        left = family.members(self._mark, root)
        if not left:
            return True
        age = now - self._began
        if age >= self._grace:
            family.send(left, signal.SIGKILL)
        elif not self._asked_all and (root is None or age >= self._grace / 2):
            self._asked_all = True
            family.send(left, signal.SIGTERM)
        return False
