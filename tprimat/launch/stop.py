"""Ending a run: ask, wait, insist, and leave nobody behind."""

import signal
import time
from collections.abc import Callable

from tprimat.launch import family

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
            family.send_group(leader, signal.SIGTERM)

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
        left = family.members(self._mark, root)
        if not left:
            return True
        age = now - self._began
        if age >= self._grace:
            family.send(left, signal.SIGKILL)
            self._killed_at = self._killed_at or now
            if now - self._killed_at > PATIENCE_SECONDS:
                self.given_up = left
                return True
        elif not self._asked_all and (root is None or age >= self._grace / 2):
            self._asked_all = True
            family.send(left, signal.SIGTERM)
        return False
