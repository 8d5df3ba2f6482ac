"""The lines of a log: from a file, a gzip file or a pipe, also while it is being written. Memory stays small."""

import codecs
import gzip
import hashlib
import io
import os
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from tprimat.core.errors import RecordError
from tprimat.core.limits import LARGEST_UNPACKED, most_unpacked
from tprimat.records.store import without_waiting

CHUNK_BYTES = 1 << 20
LONGEST_LINE = 1 << 20
"""Characters; longer lines are not log lines."""


@dataclass(slots=True)
class LogLines:
    """A log as batches of lines. `why_truncated` and `sha256`, of its unpacked bytes, are known at its end."""

    path: str
    """'-' for standard input."""
    why_truncated: str | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return "standard input" if self.path == "-" else self.path

    def batches(self) -> Iterator[list[str]]:
        """Yield whole lines, batch by batch. Raises RecordError: the file is missing, unreadable, damaged or not text."""
        try:
            if self.path == "-":
                with open(sys.stdin.fileno(), "rb", closefd=False) as pipe:
                    yield from self._text(pipe)
                return
            with open(self.path, "rb", opener=without_waiting) as file:
                os.set_blocking(file.fileno(), True)
                yield from self._text(file)
        except OSError as error:
            raise RecordError(
                f"{self.path} cannot be read: {error.strerror or error}.", where=self.path, fix="--log-file PATH, or - for a pipe"
            ) from error

    def _text(self, file: io.BufferedReader) -> Iterator[list[str]]:
        rest, sha256 = "", hashlib.sha256()
        decoder = codecs.getincrementaldecoder("utf8")("replace")
        for number, data in enumerate(self._chunks(file)):
            utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE))
            if number == 0 and (utf16 or b"\0" in data[:8192]):
                fix = "the console output of the training run as UTF-8 text, plain or gzipped"
                why = "It holds zero bytes or is UTF-16 near its start."
                raise RecordError(f"{self.name} is not a text log.", where=self.name, why=why, fix=fix)
            sha256.update(data)
            if b"\0" in data:
                self.why_truncated = "it holds zero bytes, as files do after a crash"
            text = rest + decoder.decode(data.replace(b"\0", b""))
            half = text.endswith("\r")  # perhaps of a line end of Windows
            lines = text[: len(text) - half].replace("\r\n", "\n").replace("\r", "\n").split("\n")
            rest = lines.pop() + "\r" * half
            if len(rest) > LONGEST_LINE:
                rest = ""
                self.why_truncated = "it holds a line of over a million characters"
            yield lines
        if rest.endswith("\r"):
            yield [rest[:-1]]
        elif rest:
            self.why_truncated = "its last line is not complete"
        self.sha256 = sha256.hexdigest()

    def _chunks(self, file: io.BufferedReader) -> Iterator[bytes]:
        """Yield what is in the file, of a gzip file unpacked; one that is cut short may still be written."""
        if not file.peek(2).startswith(b"\x1f\x8b"):
            yield from iter(lambda: file.read1(CHUNK_BYTES), b"")
            return
        unpacked, most = 0, most_unpacked(os.fstat(file.fileno()).st_size or LARGEST_UNPACKED)  # a pipe has no size
        try:
            with gzip.GzipFile(fileobj=file) as source:
                while data := source.read1(CHUNK_BYTES):
                    unpacked += len(data)
                    if unpacked > most:
                        raise self._refused("unpacks to far more than text does", "It may be a bomb.")
                    yield data
        except EOFError:
            self.why_truncated = "its gzip stream is cut short"
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self._refused("is a damaged gzip file", f"{error}. Steps in it may be wrong.") from error

    def _refused(self, what: str, why: str) -> RecordError:
        return RecordError(f"{self.name} {what}.", where=self.name, why=why, fix="copy the file again")
