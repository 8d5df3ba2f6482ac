"""Which dialects there are, and which one a log speaks."""

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType

from tprimat.errors import ConfigError, RecordError
from tprimat.facts.platforms import Backend
from tprimat.logs.bulk import line_pattern, rows_of_lines
from tprimat.logs.fields import LineFields
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
)
from tprimat.logs.steps import Collection
from tprimat.logs.values import plain
from tprimat.records.table import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one framework writes its log."""

    name: str
    read_line: Callable[[str], LineFields | None]
    signs: tuple[tuple[str, ...], ...]
    """A line that holds all words of one row is in this dialect."""
    platform: Backend | None
    """Where the framework runs on one platform only."""
    marks_its_end: bool
    """Whether a log that ends without a closing line was cut short."""

    line_pattern: Callable[[str], re.Pattern[str] | None] | None = None
    """A line of a step -> what lines of its shape match; None for dialects that are read line by line (bulk.py)."""

    def speaks(self, text: str) -> bool:
        """Whether the line gives the dialect away."""
        return any(all(word in text for word in sign) for sign in self.signs)


MARK_THEIR_END = {"primus", "megatron-bridge", "megatron-lm", "nemo", "torchtitan"}


def _dialect(module: ModuleType) -> Dialect:
    return Dialect(
        name=module.NAME,
        read_line=module.read_line,
        signs=module.SIGNS,
        platform=getattr(module, "PLATFORM", None),
        marks_its_end=module.NAME in MARK_THEIR_END,
        line_pattern=line_pattern if module is megatron_lm else None,
    )


DIALECTS: tuple[Dialect, ...] = tuple(
    _dialect(module)
    for module in (
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
"""The particular ones before the general ones: Primus and Megatron-Bridge print Megatron-LM's line with additions."""

NAMES = tuple(dialect.name for dialect in DIALECTS)


def find_dialect(name: str) -> Dialect:
    """By name.

    Raises:
        ConfigError: no such dialect.
    """
    for dialect in DIALECTS:
        if dialect.name == name:
            return dialect
    raise ConfigError(f"There is no log dialect {name!r}.", fix=f"one of {', '.join(NAMES)}")


def dialect_of(text: str) -> Dialect | None:
    """The dialect that one line gives away; None for lines that any framework may print."""
    text = plain(text)
    return next((dialect for dialect in DIALECTS if dialect.speaks(text)), None)


def detect(lines: Iterable[str], *, where: str) -> Dialect:
    """The dialect of a log: the first line that gives one away decides.

    Raises:
        RecordError: no line does; says what was looked for.
    """
    for line in lines:
        if found := dialect_of(line):
            return found
    raise unrecognised(where)


def unrecognised(where: str) -> RecordError:
    """The error for a log without a single training step that we know."""
    looked_for = "\n".join(f"{dialect.name}: " + " or ".join(" … ".join(sign) for sign in dialect.signs) for dialect in DIALECTS)
    return RecordError(
        f"{where} holds no training step of a framework that is known here.",
        where=where,
        why=f"No line holds any of these:\n{looked_for}",
        fix="the log of the rank that prints steps (the last rank, on the last node, for Megatron and Primus)",
    )


# A log read as it comes: its dialect found, its lines gathered, and the lines kept that tell of a failure.

TAIL = 400
MOST_ERRORS = 2000
SLOW_LINES = 100
"""Read one by one before many are tried at once."""


@dataclass(slots=True)
class LogReading:
    """State of reading one log."""

    name: str
    """For messages: a path, or standard input."""
    asked: str = "auto"
    """A dialect's name, or auto."""
    dialect: Dialect | None = None
    said: Collection = field(default_factory=Collection)
    lines: int = 0
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))
    errors: list[str] = field(default_factory=list)
    """The first lines with 'error' in them, outside of the tail too."""
    _pattern: re.Pattern[str] | None = None
    _candidates: dict[str, Collection] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.asked != "auto":
            self.dialect = find_dialect(self.asked)

    def add(self, batch: list[str]) -> None:
        """Take in whole lines. Until the dialect shows, every dialect listens."""
        start = 0
        if self.dialect is None:
            start = self._listen(batch)
        if self.dialect is not None:
            self._read(batch, start, self.dialect)
        self.lines += len(batch)
        self.tail.extend(batch[-TAIL:])

    def _listen(self, batch: list[str]) -> int:
        """Index of the first line that is left for the dialect, once it is known."""
        for index, line in enumerate(batch):
            if found := dialect_of(line):
                self.dialect = found
                self.said = self._candidates.get(found.name, self.said)
                return index
            for dialect in DIALECTS:
                if fields := dialect.read_line(line):
                    self._candidates.setdefault(dialect.name, Collection()).add(fields, self.lines + index + 1)
            self._keep_error(line)
        return len(batch)

    def _read(self, batch: list[str], start: int, dialect: Dialect) -> None:
        place = start
        while place < len(batch):
            rows = self._many(batch, place, dialect)
            if rows is not None:
                self.said.add_rows(rows)
                place += len(rows)
            stop = min(len(batch), place + SLOW_LINES)
            self._one_by_one(batch, place, stop, dialect)
            place = stop

    def _many(self, batch: list[str], place: int, dialect: Dialect) -> Rows | None:
        """Steps that can be read at once; never the last line of a batch, which more may be said about."""
        if dialect.line_pattern is None or len(self.said) < SLOW_LINES or not dialect.speaks(batch[place]):
            return None
        if self._pattern is None or not self._pattern.fullmatch(batch[place]):
            self._pattern = dialect.line_pattern(batch[place])
        if self._pattern is None:
            return None
        said = {"total_steps": self.said.total_steps, **self.said.evidence}
        return rows_of_lines(self._pattern, islice(batch, place, len(batch) - 1), said, self.said.newest)

    def _one_by_one(self, batch: list[str], start: int, stop: int, dialect: Dialect) -> None:
        read_line, add = dialect.read_line, self.said.add
        number = self.lines + start
        for line in batch if (start, stop) == (0, len(batch)) else islice(batch, start, stop):
            number += 1
            if (fields := read_line(line)) is not None:
                add(fields, number)
            elif "rror" in line:
                self._keep_error(line)

    def _keep_error(self, line: str) -> None:
        if len(self.errors) < MOST_ERRORS and ("rror" in line or "Traceback" in line):
            self.errors.append(line[:2000])

    def failure_lines(self) -> list[str]:
        """What a classifier should look at, in the order of the log as far as kept; steps speak for themselves."""
        tail = [line for line in self.tail if self.dialect is None or self.dialect.read_line(line) is None]
        inside = set(tail)
        return [line for line in self.errors if line[:2000] not in inside] + tail

    def check(self, cause: str | None) -> Dialect:
        """The dialect, when there is at least one step.

        Raises:
            RecordError: no step; says why where the log tells, and what was looked for.
        """
        if self.dialect is not None and len(self.said):
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
                why="\n".join([f"No line holds {looked_for} with a step and its numbers.", *([cause] if cause else [])]),
                fix="--dialect auto",
            )
        if cause:
            raise RecordError(f"{self.name} holds no training step; the run failed before its first.", where=self.name, why=cause)
        raise unrecognised(self.name)
