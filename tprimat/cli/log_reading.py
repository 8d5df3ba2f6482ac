"""A log read as it comes: its dialect found, its lines gathered, and the lines kept that tell of a failure."""

import re
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from tprimat.engines.logs.bulk import rows_of_lines
from tprimat.engines.logs.collect import Collection
from tprimat.engines.logs.dialects import DIALECTS, Dialect, dialect_of, find_dialect, unrecognised
from tprimat.errors import RecordError
from tprimat.record.table import Rows

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
