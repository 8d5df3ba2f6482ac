"""What a run prints: to the log files byte by byte, and to whoever watches line by line."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

TAIL_LINES = 20_000
"""Kept for the classification of a failure: the tracebacks of a few hundred ranks."""
LONGEST_LINE = 1 << 20
"""Bytes. What is longer comes in parts, so that binary output cannot fill the memory."""
LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""A progress bar ends its line with \\r alone. A \\r at the end of a chunk waits for the \\n that may follow."""


class Output:
    """Takes bytes as they come.

    A log that cannot be written is mentioned once and never stops the run: the measurements do not depend on it.
    """

    def __init__(self, logs: Sequence[Path], on_line: Callable[[str], None], on_notice: Callable[[str], None]) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._on_notice = on_notice
        self._pending = b""
        self._files: dict[Path, BinaryIO] = {}
        self._complained: set[Path] = set()
        for path in dict.fromkeys(logs):
            self._open(path)

    def note(self, text: str) -> None:
        """Lines of ours, for the logs only."""
        self._write_all("".join(f"{line}\n" for line in text.splitlines()).encode())

    def feed(self, chunk: bytes) -> None:
        """Some bytes of output."""
        self._write_all(chunk)
        *lines, self._pending = LINE_END.split(self._pending + chunk)
        for line in lines:
            self._line(line)
        if len(self._pending) > LONGEST_LINE:
            self._flush()

    def close(self) -> None:
        """No more output: the last line counts also without its end."""
        self._flush()
        for file in self._files.values():
            file.close()

    def _open(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = path.open("ab", buffering=0)
        except OSError as error:
            self._complain(path, error)

    def _write_all(self, data: bytes) -> None:
        for path, file in self._files.items():
            self._write(path, file, data)

    def _write(self, path: Path, file: BinaryIO, chunk: bytes) -> None:
        try:
            written = file.write(chunk)
            while written < len(chunk):  # a disk that is filling up takes a part, and refuses the rest
                written += file.write(chunk[written:])
        except OSError as error:
            self._complain(path, error)

    def _complain(self, path: Path, error: OSError) -> None:
        if path not in self._complained:
            self._complained.add(path)
            self._on_notice(f"the log {path} cannot be written ({error.strerror or error}); the run goes on without it.")

    def _flush(self) -> None:
        line, self._pending = self._pending.removesuffix(b"\r"), b""
        self._line(line)

    def _line(self, raw: bytes) -> None:
        if raw:
            text = raw.decode("utf8", errors="replace")
            self.tail.append(text)
            self._on_line(text)
