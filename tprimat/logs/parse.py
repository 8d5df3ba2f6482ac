"""A training log read line by line: its dialect recognised, the fields of its lines collected, lines about errors kept."""

import codecs
import hashlib
import json
import os
import re
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from types import ModuleType

from tprimat.core.accelerators import Backend
from tprimat.core.errors import WORKER_ERROR, ConfigError, RecordError
from tprimat.logs.fields import LineFields, plain
from tprimat.logs.foreign import Foreign, foreign_of
from tprimat.logs.formats import (
    composer,
    deepspeed,
    maxtext,
    megatron_bridge,
    megatron_lm,
    nanotron,
    nemo,
    primus,
    torchtitan,
    torchtune,
    tprimat,
)
from tprimat.logs.steps import LogContents
from tprimat.records.store import without_waiting

# The lines of a log: from a file, a gzip file or a pipe, also while it is being written. Memory stays small.

CHUNK_BYTES = 1 << 20
LONGEST_LINE = 1 << 20
"""Characters; longer lines are not log lines."""
POLL_SECONDS = 0.2
GZIP_MAGIC = b"\x1f\x8b"
GZIP_WINDOW = 31
"""zlib: the largest window, with a gzip header."""


class Hashing:
    """A reader that takes the SHA-256 of the bytes it passes on."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        """Return the bytes available now; a pipe waits for its first byte."""
        data = self._file.read1(size)
        self.sha256.update(data)
        return data


@dataclass(slots=True)
class LogLines:
    """A log as batches of lines. `truncated` and `sha256` are known at its end."""

    path: str
    """'-' for standard input."""
    follow: bool = False
    """Wait for more at the end of a file, until `stop` is set."""
    stop: bool = False
    truncated: bool = False
    why_truncated: str | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return "standard input" if self.path == "-" else self.path

    def batches(self) -> Iterator[list[str]]:
        """Yield the whole lines available now; an empty list while a followed file does not grow.

        Raises:
            RecordError: the file is missing, unreadable or not text.
        """
        if self.path == "-":
            with open(sys.stdin.fileno(), "rb", closefd=False) as pipe:
                yield from self._text(Hashing(pipe))
            return
        try:
            with open(self.path, "rb", opener=without_waiting) as file:
                os.set_blocking(file.fileno(), True)
                yield from self._text(Hashing(file))
        except OSError as error:
            raise RecordError(
                f"{self.path} cannot be read: {error.strerror or error}.", where=self.path, fix="--log-file PATH, or - for a pipe"
            ) from error

    def _text(self, source: Hashing) -> Iterator[list[str]]:
        rest, first = "", True
        decoder = codecs.getincrementaldecoder("utf8")("replace")
        for data in self._chunks(source):
            if first and data:
                self._refuse_binary(data)
                first = False
            if b"\0" in data:
                self._cut("it holds zero bytes, as files do after a crash")
            text = rest + decoder.decode(data.replace(b"\0", b""))
            lines = text.replace("\r", "\n").split("\n")
            rest = lines.pop()
            if len(rest) > LONGEST_LINE:
                rest = ""
                self._cut("it holds a line of over a million characters")
            yield lines
        if rest:
            self._cut("its last line is not complete")
        self.sha256 = source.sha256.hexdigest()

    def _cut(self, why: str) -> None:
        self.truncated, self.why_truncated = True, why

    def _refuse_binary(self, data: bytes) -> None:
        if (
            data[:4] in {b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"}
            or data[:2] in {b"\xff\xfe", b"\xfe\xff"}
            or b"\0" in data[:8192]
        ):
            raise RecordError(
                f"{self.name} is not a text log.",
                where=self.name,
                why="It holds zero bytes or is UTF-16 near its start.",
                fix="the console output of the training run as UTF-8 text, plain or gzipped",
            )

    def _chunks(self, source: Hashing) -> Iterator[bytes]:
        head = source.read(CHUNK_BYTES)
        while 0 < len(head) < len(GZIP_MAGIC) and (more := source.read(CHUNK_BYTES)):
            head += more
        if head.startswith(GZIP_MAGIC):
            yield from self._unpacked(head, source)
            return
        yield head
        while True:
            data = source.read(CHUNK_BYTES)
            if not data and (self.path == "-" or not self.follow or self.stop):
                return
            yield data
            if not data:
                time.sleep(POLL_SECONDS)

    def _unpacked(self, head: bytes, source: Hashing) -> Iterator[bytes]:
        unpacker, data = zlib.decompressobj(wbits=GZIP_WINDOW), head
        try:
            while data:
                yield unpacker.decompress(data, CHUNK_BYTES)
                while unpacker.unconsumed_tail:
                    yield unpacker.decompress(unpacker.unconsumed_tail, CHUNK_BYTES)
                rest = unpacker.unused_data
                if unpacker.eof and rest:
                    unpacker = zlib.decompressobj(wbits=GZIP_WINDOW)
                data = rest or source.read(CHUNK_BYTES)
                if unpacker.eof and data:
                    unpacker = zlib.decompressobj(wbits=GZIP_WINDOW)
        except zlib.error:
            self._cut("its gzip stream is damaged")
        else:
            if not unpacker.eof:
                self._cut("its gzip stream is cut short")


LAST_LINES = 400
"""Kept of every log, to look for the cause of a failure."""
LONGEST_KEPT = 1 << 14
"""Characters of each of them: enough for a record of TPrimat, and 400 of them stay small."""
MOST_ERRORS = 2000
LONGEST_ERROR = 2000
"""Characters."""
FENCE = re.compile(r"\s*(?:```|~~~)")
"""Begins a block of Markdown, which quotes what a program printed."""
PRINTED = re.compile(
    r"Traceback \(most recent call last\):$"
    r"|^(?:\[rank\d+\]: ?)?(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?::|$)"
    rf"|^{WORKER_ERROR}|ChildFailedError|Root Cause \(first observed failure\)|\[rank-?\d+[\]/]|\bNCCL (?:WARN|INFO) "
    r"|^(?:srun|slurmstepd|torchrun|mpirun|python[\d.]*|docker|bash|\S+\.(?:sh|py)): "
    r"|^(?:Memory access fault by GPU|Segmentation fault|Fatal Python error)"
    r"|^[EWIF]\d{4} \d\d:|^\[?\d{4}-?\d\d-?\d\d[ T_]\d\d:|^\[ *\d+\.\d+\]"
)
"""Lines of Python, torchrun, a scheduler or the kernel, as a process or a launcher prints them: no sentence about an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one framework writes its log."""

    name: str
    read_line: Callable[[str], LineFields | None]
    signs: tuple[tuple[str, ...], ...]
    """A line that holds all words of one row is in this dialect."""
    marks: tuple[str, ...]
    """Every line with fields holds one of them."""
    platform: Backend | None
    """Where the framework runs on one platform only."""
    unmasked_rate: bool
    """Whether its rate leaves out tokens without a loss."""
    marks_its_end: bool
    """Whether a log without a closing line was cut short."""

    def speaks(self, text: str) -> bool:
        """Whether only this dialect, or one further down in DIALECTS, writes such a line."""
        return any(all(word in text for word in sign) for sign in self.signs)


MARK_THEIR_END = {"tprimat", "primus", "megatron-bridge", "megatron-lm", "nemo", "torchtitan"}


def _dialect(module: ModuleType) -> Dialect:
    return Dialect(
        name=module.NAME,
        read_line=module.read_line,
        signs=module.SIGNS,
        marks=module.MARKS,
        platform=getattr(module, "PLATFORM", None),
        unmasked_rate=getattr(module, "UNMASKED_RATE", False),
        marks_its_end=module.NAME in MARK_THEIR_END,
    )


DIALECTS: tuple[Dialect, ...] = tuple(
    _dialect(module)
    for module in (
        tprimat,
        primus,
        megatron_bridge,
        megatron_lm,
        nemo,
        torchtitan,
        torchtune,
        nanotron,
        maxtext,
        deepspeed,
        composer,
    )
)
"""Specific ones before general ones: Primus and Megatron-Bridge print Megatron-LM's line with additions."""

NAMES = tuple(dialect.name for dialect in DIALECTS)


def find_dialect(name: str) -> Dialect:
    """Return the dialect of a name.

    Raises:
        ConfigError: there is none.
    """
    for dialect in DIALECTS:
        if dialect.name == name:
            return dialect
    raise ConfigError(f"There is no log dialect {name!r}.", fix=f"one of {', '.join(NAMES)}")


def dialect_of(text: str) -> Dialect | None:
    """Return the dialect of one line; None for lines that any framework may print."""
    text = plain(text)
    return next((dialect for dialect in DIALECTS if dialect.speaks(text)), None)


def unrecognised(where: str) -> RecordError:
    """Return the error for a log without a training step of any dialect."""
    looked_for = "\n".join(f"{dialect.name}: " + " or ".join(" … ".join(sign) for sign in dialect.signs) for dialect in DIALECTS)
    return RecordError(
        f"{where} holds no training step of a known framework.",
        where=where,
        why=f"No line holds any of these:\n{looked_for}",
        fix="the log of the rank that prints steps (the last rank, on the last node, for Megatron and Primus)",
    )


def not_read(foreign: Foreign, where: str, line: int) -> RecordError:
    """Return the error for a log of a framework whose steps are not read."""
    return RecordError(
        f"{where} looks like a log of {foreign.name}, whose steps are not read.",
        where=f"{where}:{line}",
        why=foreign.why,
        fix=foreign.fix or f"a log of one of {', '.join(NAMES)}",
    )


WRAPPED = ('{"log":', '{"message":', '{"textPayload":')
"""How a line begins that Docker, CloudWatch or Google's logging keeps as JSON."""


def unwrapped(line: str) -> list[str]:
    """Return the printed lines of one that is kept as JSON, which holds all redrawings of a progress bar; a torn one as it is."""
    try:
        kept = json.loads(line)
    except (ValueError, RecursionError):
        return [line]
    text = next((kept[name] for name in ("log", "message", "textPayload") if name in kept), None)
    return text.rstrip("\r\n").replace("\r", "\n").split("\n") if isinstance(text, str) else [line]


STEPS_TO_DECIDE = 2


@dataclass(slots=True)
class LogReading:
    """The state of reading one log."""

    name: str
    """For messages: a path, or standard input."""
    requested_dialect: str = "auto"
    """A dialect's name, or auto."""
    dialect: Dialect | None = None
    contents: LogContents = field(default_factory=LogContents)
    lines: int = 0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    errors: list[str] = field(default_factory=list)
    """The first lines that mention an error."""
    _candidates: dict[str, LogContents] = field(default_factory=dict)
    _foreign: tuple[Foreign, int] | None = None
    """The first step of a framework whose steps are not read, and its line."""
    _undecided: int = 0
    """Steps of Megatron-LM after which the log is not one of Megatron-Bridge."""

    def __post_init__(self) -> None:
        if self.requested_dialect != "auto":
            self.dialect = find_dialect(self.requested_dialect)

    def add(self, batch: list[str]) -> None:
        """Take in whole lines. Until the dialect is known, every dialect reads them."""
        batch = [text for line in batch for text in (unwrapped(line) if line.startswith(WRAPPED) else [line])]
        start = 0 if self.dialect is not None else self._recognise(batch)
        if self._undecided:
            start = self._decide(batch, start)
        if self.dialect is not None:
            self._read(batch, start, self.dialect)
        self.lines += len(batch)
        self.last_lines.extend(line[:LONGEST_KEPT] for line in batch[-LAST_LINES:])

    def _recognise(self, batch: list[str]) -> int:
        """Return the index of the line that shows the dialect, from which on only this dialect reads."""
        for index, line in enumerate(batch):
            if not line or line.isspace():
                continue
            if dialect := dialect_of(line):
                self.dialect = dialect
                self.contents = self._candidates.setdefault(dialect.name, self.contents)
                self._undecided = STEPS_TO_DECIDE if dialect.name == megatron_lm.NAME else 0
                return index
            for candidate in DIALECTS:
                if fields := candidate.read_line(line):
                    self._candidates.setdefault(candidate.name, LogContents()).add(fields, self.lines + index + 1)
            if self._foreign is None and (foreign := foreign_of(line)):
                self._foreign = foreign, self.lines + index + 1
            if "rror" in line or "Traceback" in line:
                self._keep_error(line)
        return len(batch)

    def _decide(self, batch: list[str], start: int) -> int:
        """Read as Megatron-LM and as Megatron-Bridge, until a line tells them apart; return the index of the next line to read.

        Two ranks of Megatron-Bridge print its own line and Megatron-LM's, in any order.
        """
        both = [find_dialect(name) for name in (megatron_lm.NAME, megatron_bridge.NAME)]
        for index in range(start, len(batch)):
            line = batch[index]
            if (spoken := dialect_of(line)) is both[1]:
                self._undecided, self.dialect = 0, both[1]
                self.contents = self._candidates.setdefault(both[1].name, LogContents())
                return index
            read = False
            for dialect in both:
                if fields := dialect.read_line(line):
                    self._candidates.setdefault(dialect.name, LogContents()).add(fields, self.lines + index + 1)
                    read = read or dialect is both[0]
            if not read and "rror" in line:
                self._keep_error(line)
            self._undecided -= spoken is both[0]
            if not self._undecided:
                return index + 1
        return len(batch)

    def _read(self, batch: list[str], start: int, dialect: Dialect) -> None:
        """Read the lines with a mark. A search of the whole text finds the few marks that occur in it at all."""
        text = "\n".join(batch)
        marks = [mark for mark in (*dialect.marks, "rror") if mark in text]
        marked = {index for mark in marks for index, line in enumerate(batch) if mark in line}
        for index in sorted(index for index in marked if index >= start):
            line = batch[index]
            if (fields := dialect.read_line(line)) is not None:
                self.contents.add(fields, self.lines + index + 1)
            elif "rror" in line:
                self._keep_error(line)

    def _keep_error(self, line: str) -> None:
        if len(self.errors) < MOST_ERRORS:
            self.errors.append(line[:LONGEST_ERROR])

    def failure_lines(self) -> list[str]:
        """Return the lines that may name the cause of a failure, in the order of the log; without lines of steps."""
        last = [line for line in self.last_lines if self.dialect is None or self.dialect.read_line(line) is None]
        seen = set(last)
        return [line for line in self.errors if line not in seen] + last

    def check(self, cause: str | None) -> Dialect | None:
        """Return the dialect of a log of a training run; None where the run failed before a line showed the framework.

        Args:
            cause: why the run failed, where the log says so.

        Raises:
            RecordError: the log is not that of a training run: no step, no cause and no framework's settings.
        """
        begun = self.contents.steps or self.contents.run is not None
        lines = self.failure_lines()
        quoted = any(FENCE.match(line) for line in lines)
        failed = cause is not None and not quoted and any(PRINTED.search(plain(line).strip()) for line in lines)
        if self.dialect is not None and (begun or (failed and not self._speaks_another())):
            return self.dialect
        if self.lines == 0:
            raise RecordError(
                f"{self.name} holds no line that can be read.",
                where=self.name,
                fix="the console output of the rank that prints steps",
            )
        if self.dialect is not None:
            looked_for = " or ".join(" … ".join(sign) for sign in self.dialect.signs)
            raise RecordError(
                f"{self.name} holds no training step of {self.dialect.name}.",
                where=self.name,
                why=f"No line holds {looked_for} with a step and its numbers.",
                fix="--dialect auto",
            )
        if self._foreign is not None and not (failed and self._foreign[0].beside):
            raise not_read(self._foreign[0], self.name, self._foreign[1])
        if (likeliest := self._likeliest()) is None and not failed:
            raise unrecognised(self.name)
        if quoted:
            raise unrecognised(self.name)
        return likeliest

    def _speaks_another(self) -> bool:
        """Whether a line near the end is a step in a dialect other than the requested one."""
        return any(dialect_of(line) not in {None, self.dialect} for line in self.last_lines)

    def _likeliest(self) -> Dialect | None:
        """Take the dialect that reads most settings from a log without steps; None where no line is a setting of any.

        Primus and Megatron-Bridge print Megatron-LM's settings too, so Megatron-LM comes before them where they read as many.
        """
        read = {name: len(found.evidence) + len(found.arguments) for name, found in self._candidates.items()}
        named = {name: settings for name, settings in read.items() if settings}
        if not named:
            return None
        name = max(named, key=lambda name: (named[name], name == "megatron-lm"))
        self.contents = self._candidates[name]
        self.dialect = find_dialect(name)
        return self.dialect
