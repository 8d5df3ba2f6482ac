"""Read the output of a vendor's tool line by line, and make sure that the tool ends with the launcher."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

KILL_TIMEOUT_SECONDS = 2.0
TAKE_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[2:])"
"""Runs in the tool's process before the tool: a preexec_fn would be Python code in a fork of a process with threads."""


class LineSubprocess:
    """Run one program at a time; `stop`, called from another thread, ends it and refuses to start more."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def lines(self, argv: Sequence[str]) -> Iterator[str]:
        """Yield the program's output as it is printed, until the program ends; nothing after `stop`.

        The output is the program's controlling terminal, so that the kernel hangs the program up when the launcher is gone, even
        by SIGKILL.

        Raises:
            OSError: the program is not installed, or cannot be started.
        """
        reading = self._start(argv)
        if reading is None:
            return
        try:
            with os.fdopen(reading, encoding="utf8", errors="replace") as stream, contextlib.suppress(OSError):
                for line in stream:  # a terminal that nobody writes to any more ends in EIO
                    yield line.rstrip("\n")
        finally:
            self._end()

    def stop(self) -> None:
        """Kill the running program."""
        self.stopping.set()
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _start(self, argv: Sequence[str]) -> int | None:
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
                    stderr=subprocess.DEVNULL,
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
                process.wait(KILL_TIMEOUT_SECONDS)
