"""A program that is listened to while a run goes on, and that ends with the launcher, however the launcher ends."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

SECONDS_TO_DIE = 2.0
TAKE_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[2:])"
"""Run before the program, in its process: a preexec_fn would be Python code in a fork of a process with threads."""


class Tool:
    """Starts one program at a time; `stop`, from another thread, ends it and refuses to start more."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def lines(self, argv: Sequence[str], *, errors_too: bool = False) -> Iterator[str]:
        """What the program prints, as it prints it, until it ends. Nothing after `stop`.

        It writes to a terminal: into a pipe a program may hold its lines back until it has written thousands. The terminal
        is its controlling one, so that the kernel hangs it up when the launcher is gone, even by SIGKILL.

        Raises:
            OSError: it is not installed, or cannot be started.
        """
        reading = self._start(argv, errors_too)
        if reading is None:
            return
        try:
            with os.fdopen(reading, encoding="utf8", errors="replace") as stream, contextlib.suppress(OSError):
                for line in stream:  # ends in EIO, a terminal's way to say that nobody writes any more
                    yield line.rstrip("\n")
        finally:
            self._end()

    def stop(self) -> None:
        """End what runs."""
        self.stopping.set()
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _start(self, argv: Sequence[str], errors_too: bool) -> int | None:
        program = shutil.which(argv[0])
        if program is None:
            raise FileNotFoundError(errno.ENOENT, "not installed", argv[0])
        reading, writing = os.openpty()
        try:
            with self._lock:
                if self.stopping.is_set():
                    os.close(reading)
                    return None
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", TAKE_TERMINAL, program, *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=writing,
                    stderr=subprocess.STDOUT if errors_too else subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return reading

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # inside the kernel, where no signal reaches it
                process.wait(SECONDS_TO_DIE)
