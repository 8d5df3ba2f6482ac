"""The standard streams of a command: its reader may leave (`| head`), its disk may fill up, a signal may end it."""

import errno
import os
import re
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

READER_GONE = {errno.EPIPE, errno.EIO}
"""Errors of a pipe and of a terminal without a reader."""
PATIENCE_SECONDS = 0.1
"""How long progress waits, once, for a reader that has fallen behind, before lines are dropped."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command as an exception, so that its temporary files go."""
ESCAPES = re.compile(
    r"\x1b(?!\[2K)(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[^\[\]])?"
    r"|\r(?!\n|\x1b\[2K)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]"
)
"""Control characters and sequences, except those of our own live line: logs and files of others may hold any."""


class Stream:
    """A text stream that discards what can no longer be written, and control characters.

    One that may lose lines drops them while its reader has stalled, so that runs, signals and time limits go on; every one may
    once a signal has arrived, which makes `signals` readable.
    """

    def __init__(self, stream: TextIO, signals: socket.socket, *, may_lose_lines: bool) -> None:
        self._stream, self._signals = stream, signals
        self.may_lose_lines = may_lose_lines
        self._dropped = False
        self.lost: OSError | None = None
        """Why output that a reader still expects is missing, such as a full disk."""

    def write(self, text: str) -> int:
        """Write some text."""
        if self._ready():
            missing = "(lines are missing here: nobody read them in time)\n" if self._dropped else ""
            self._dropped = False
            self._try(lambda: self._stream.write(missing + ESCAPES.sub("", text)))
        else:
            self._dropped = True
        return len(text)

    def flush(self) -> None:
        """Hand over what was written."""
        if self._ready():
            self._try(self._stream.flush)

    def finish(self) -> None:
        """Hand over what was written, or discard it, so that Python does not wait for the reader at its end."""
        if not self._ready():
            self._discard()
        self._try(self._stream.flush)

    def _ready(self) -> bool:
        """Wait for the reader; return False where it has stalled and lines may be lost."""
        if not self.may_lose_lines:
            signalled, ready, _ = select.select([self._signals], [self._stream], [])
            self.may_lose_lines = bool(signalled)
            return bool(ready)
        return bool(select.select([], [self._stream], [], 0.0 if self._dropped else PATIENCE_SECONDS)[1])

    def _discard(self) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self.lost = self.lost or (None if error.errno in READER_GONE else error)
            self._discard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def say(text: str) -> None:
    """Write a line to the stream of errors, if there is one."""
    if sys.stderr:
        sys.stderr.write(f"{text}\n")


def run_as_script(program: Callable[[], int]) -> int:
    """Run a program whose reader may leave; return its status, whether or not anybody read to the end.

    It is 1 instead of 0 where a file holds less than was printed; and 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, each
    with no temporary file left.
    """
    former = sys.stdout, sys.stderr
    # Where Python was started with a closed descriptor, the stream is None.
    signals, arrivals = socket.socketpair()  # a handler of the launcher only counts signals, and a write would go on waiting
    arrivals.setblocking(False)
    streams = [Stream(stream, signals, may_lose_lines=stream is former[1]) if stream else None for stream in former]
    sys.stdout, sys.stderr = cast("list[TextIO]", streams)
    status, stopped = 1, 0

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal stopped
        stopped = stopped or number
        raise KeyboardInterrupt

    own_thread = threading.current_thread() is threading.main_thread()  # signals reach no other
    usual = {signal.SIG_DFL, signal.default_int_handler}
    ours = [number for number in STOPS if own_thread and signal.getsignal(number) in usual]
    for number in ours:
        signal.signal(number, stop)
    if own_thread:
        signal.set_wakeup_fd(arrivals.fileno(), warn_on_full_buffer=False)
    try:
        status = program()
    except (KeyboardInterrupt, Exception) as error:
        if not stopped and not isinstance(error, KeyboardInterrupt):
            raise
        say("stopped")  # also where compiled code turned the interrupt into an error of its own
        status = 128 + (stopped or signal.SIGINT)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        for stream in filter(None, streams):
            stream.finish()
            if stream.lost:
                say(f"error: not all of the output could be written: {stream.lost.strerror}")
                status = status or 1
        sys.stdout, sys.stderr = former
        if own_thread:
            signal.set_wakeup_fd(-1)
        for number in ours:  # nothing is left to tidy up
            signal.signal(number, signal.SIG_DFL)
    return status
