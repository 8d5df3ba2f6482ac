"""The standard streams of a command whose reader may stall or leave: a paused terminal, a pager, `| head`, a full disk.

A write never blocks the caller, so that runs, signals and time limits work, whatever the reader does. One thread
writes, with os.write: Python's own buffers would lock the process at its end while a write is blocked.
"""

import errno
import os
import re
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

READER_GONE = {errno.EPIPE, errno.EIO}
"""Errors of a pipe and of a terminal without a reader."""
MOST_WAITING_CHARACTERS = 1 << 16
"""For a reader of progress. Results wait without a limit."""
PATIENCE_SECONDS = 0.1
"""How long progress waits, once, for a reader that has fallen behind, before lines are dropped."""
SECONDS_AFTER_A_SIGNAL = 1.0
"""How long a command waits for its reader after a signal to end."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command as an exception, so that its temporary files go."""
ESCAPES = re.compile(
    r"\x1b(?!\[[0-9;]*m|\[2K)(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[^\[\]])?"
    r"|\r(?!\n|\x1b\[2K)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]"
)
"""Control characters and sequences but colours and those of our own live line: logs and files of others may hold any."""


class Queue:
    """What waits to be written to the streams of this process, in the order in which it was printed."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Stream, str]] = deque()
        self._characters = 0
        self._dropped: dict[Stream, int] = {}
        self._changed = threading.Condition()
        self._stalled = False
        """The reader has taken nothing since progress waited for it in vain."""
        self._thread: threading.Thread | None = None

    def put(self, stream: "Stream", text: str) -> None:
        """Take some text; drop it where too much waits already, the stream may lose lines and its reader has stalled."""

        def fits() -> bool:
            return not self._characters or self._characters + len(text) <= MOST_WAITING_CHARACTERS

        with self._changed:
            if stream.may_lose_lines and not fits() and not self._stalled:
                self._stalled = not self._changed.wait_for(fits, PATIENCE_SECONDS)
            if stream.may_lose_lines and not fits():
                self._dropped[stream] = self._dropped.get(stream, 0) + text.count("\n")
                return
            self._say_what_is_missing()
            self._append(stream, text)
        if self._thread is None:
            self._thread = threading.Thread(target=self._pass_on, daemon=True)
            self._thread.start()

    def drain(self, seconds: float | None) -> None:
        """Wait until everything is written; for so many seconds at most, None for as long as the readers take."""
        with self._changed:
            self._say_what_is_missing()
            self._changed.wait_for(lambda: not self._characters, seconds)

    def _append(self, stream: "Stream", text: str) -> None:
        self._waiting.append((stream, text))
        self._characters += len(text)
        self._changed.notify_all()

    def _say_what_is_missing(self) -> None:
        for stream, lines in self._dropped.items():
            if lines:
                self._append(stream, f"({lines:,} lines are missing here: nobody read them in time)\n")
        self._dropped.clear()

    def _pass_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                stream, text = self._waiting.popleft()
            stream.write_now(text)
            with self._changed:
                self._characters -= len(text)
                self._stalled = False
                self._changed.notify_all()


class Stream:
    """A text stream that takes what is written at once, and passes it on as fast as it is read."""

    def __init__(self, stream: TextIO, queue: Queue, *, may_lose_lines: bool) -> None:
        self._stream = stream
        self._queue = queue
        self._line = ""
        self.may_lose_lines = may_lose_lines
        self.lost: OSError | None = None
        """Why output is missing that a reader still expects, such as a full disk."""

    def write(self, text: str) -> int:
        """Take some text; a part of a line waits for its end or for `flush`."""
        self._line += text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Hand over what was written, without waiting for the reader."""
        text, self._line = ESCAPES.sub("", self._line), ""
        if text:
            self._queue.put(self, text)

    def write_now(self, text: str) -> None:
        """Write, however long the reader takes; discard what can no longer be written."""
        data = text.encode(self._stream.encoding or "utf8", "backslashreplace")
        descriptor = self._stream.fileno()
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # somebody who shares the terminal made it non-blocking
                select.select([], [descriptor], [])
            except OSError as error:
                self.lost = self.lost or (None if error.errno in READER_GONE else error)
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, descriptor)
                os.close(nothing)
                return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run_as_script(program: Callable[[], int]) -> int:
    """Run a program whose reader may stall or leave.

    Returns:
        the program's status, whether or not anybody read to the end; 1 instead of 0 where a file holds less than was printed;
        130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, each with no temporary file left.
    """
    former, queue = (sys.stdout, sys.stderr), Queue()
    # Where Python was started with a closed descriptor, the stream is None.
    out = Stream(sys.stdout, queue, may_lose_lines=False) if sys.stdout else None
    err = Stream(sys.stderr, queue, may_lose_lines=True) if sys.stderr else None
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", (out, err))
    status, stopped = 1, 0

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal stopped
        stopped = stopped or number
        raise KeyboardInterrupt

    ours = [number for number in STOPS if signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}]
    if threading.current_thread() is not threading.main_thread():
        ours = []
    for number in ours:
        signal.signal(number, stop)
    try:
        status = program()
    except (KeyboardInterrupt, Exception) as error:
        if not stopped and not isinstance(error, KeyboardInterrupt):
            raise
        say(err, "stopped\n")  # also where compiled code turned the interrupt into an error of its own
        status = 128 + (stopped or signal.SIGINT)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        streams = [stream for stream in (out, err) if stream]
        try:
            finish(queue, streams, status)
            for lost in (stream.lost for stream in streams if stream.lost):
                say(err, f"error: not all of the output could be written: {lost.strerror}\n")
                status = status or 1
            finish(queue, streams, status)
        except KeyboardInterrupt:  # the user does not wait for a reader that stalls
            status = 128 + (stopped or signal.SIGINT)
        sys.stdout, sys.stderr = former
        for number in ours:  # nothing is left to tidy up
            signal.signal(number, signal.SIG_DFL)
    return status


def say(stream: Stream | None, text: str) -> None:
    """Write to a stream, if there is one."""
    if stream is not None:
        stream.write(text)


def finish(queue: Queue, streams: Sequence[Stream], status: int) -> None:
    """Wait for the readers, but not long where a signal asked for the end."""
    for stream in streams:
        stream.flush()
    queue.drain(SECONDS_AFTER_A_SIGNAL if status > 128 else None)
