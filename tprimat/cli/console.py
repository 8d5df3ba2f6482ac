"""Printing that outlasts its reader: neither `| head` nor a window that was closed nor a full disk behind `>` ends a run."""

import errno
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

READER_GONE = {errno.EPIPE, errno.EIO}
"""Of a pipe, of a terminal."""


class Outlasting:
    """A stream of text that goes on into nothing once it cannot be written any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None
        """Why there is less than a reader who is still there would want."""

    def write(self, text: str) -> int:
        """As if it had been written."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._let_go(error)
            return len(text)

    def flush(self) -> None:
        """What is still on its way, if anybody reads it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._let_go(error)

    def _let_go(self, error: OSError) -> None:
        self.lost = self.lost or (None if error.errno in READER_GONE else error)
        # The descriptor itself, since Python flushes the stream once more when the process ends.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlasting(main: Callable[[], int]) -> int:
    """Run a program whose output may not find its way.

    Returns:
        what the program returns, whether or not anybody read to the end; but no success where a file holds less than was printed.
    """
    # Where Python was started with a closed descriptor, the stream is None.
    streams = [Outlasting(stream) if stream else None for stream in (sys.stdout, sys.stderr)]
    sys.stdout, sys.stderr = streams
    status = 1
    try:
        status = main()
    except KeyboardInterrupt:  # by a program that needs no time to stop in order
        print("stopped", file=sys.stderr)
        status = 130
    finally:
        for stream in filter(None, streams):
            stream.flush()
        for lost in (stream.lost for stream in streams if stream and stream.lost):
            print(f"error: not all of the output could be written: {lost.strerror}", file=sys.stderr)
            status = status or 1
    return status
