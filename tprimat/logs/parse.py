"""A training log read line by line: its dialect recognised, the fields of its lines collected, lines about errors kept."""

import re
from collections import deque
from dataclasses import dataclass, field

from tprimat.core.errors import WORKER_ERROR, RecordError
from tprimat.logs.contents import LogContents
from tprimat.logs.fields import Dialect, plain
from tprimat.logs.foreign import Foreign, foreign_of
from tprimat.logs.formats import deepspeed, maxtext, megatron_bridge, nemo, primus, torchtitan, tprimat
from tprimat.logs.formats.megatron_bridge import MEGATRON_LM
from tprimat.logs.lines import unwrapped

LAST_LINES = 400
"""Kept of every log, to look for the cause of a failure."""
LONGEST_KEPT = 1 << 14
"""Characters of each of them: enough for a record of TPrimat, and 400 of them stay small."""
MOST_ERRORS = 2000
LONGEST_ERROR = 2000
"""Characters."""
FIRST_STEPS = 3
"""Among so many, lines are looked for that only look like those of a framework that is read."""
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
DIALECTS: tuple[Dialect, ...] = (
    tprimat.DIALECT,
    primus.DIALECT,
    megatron_bridge.DIALECT,
    MEGATRON_LM,
    nemo.DIALECT,
    torchtitan.DIALECT,
    maxtext.DIALECT,
    deepspeed.DIALECT,
)
"""Specific ones before general ones: Primus and Megatron-Bridge print Megatron-LM's line with additions."""
NAMES = tuple(dialect.name for dialect in DIALECTS)


def dialect_of(text: str) -> Dialect | None:
    """Return the dialect of one line; None for lines that any framework may print."""
    text = plain(text)
    return next((dialect for dialect in DIALECTS if dialect.speaks(text)), None)


@dataclass(slots=True)
class LogReading:
    """The state of reading one log."""

    name: str
    """For messages: a path, or standard input."""
    dialect: Dialect | None = None
    """None until a line shows it."""
    contents: LogContents = field(default_factory=LogContents)
    lines: int = 0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    errors: list[str] = field(default_factory=list)
    """The first lines that mention an error."""
    _candidates: dict[Dialect, LogContents] = field(default_factory=dict)
    """What each dialect has read before the first line that shows the log's own."""
    _foreign: tuple[Foreign, int] | None = None
    """The first line of a framework whose steps are not read, and its number."""

    def add(self, batch: list[str]) -> None:
        """Take in whole lines. Until the dialect is known, every dialect reads them."""
        batch = [text for line in batch for text in unwrapped(line)]
        start = 0 if self.dialect is not None else self._recognise(batch)
        if self.dialect is not None:
            self._read(batch, start)
        self.lines += len(batch)
        self.last_lines.extend(line[:LONGEST_KEPT] for line in batch[-LAST_LINES:])

    def _recognise(self, batch: list[str]) -> int:
        """Return the index of the line that shows the dialect, from which on only this dialect reads."""
        for index, line in enumerate(batch):
            if not line or line.isspace():
                continue
            if dialect := dialect_of(line):
                self.dialect = dialect
                self.contents = self._candidates.setdefault(dialect, self.contents)
                return index
            for candidate in DIALECTS:
                if fields := candidate.read_line(line):
                    self._candidates.setdefault(candidate, LogContents()).add(fields, self.lines + index + 1)
            self._note_foreign(line, index)
            if "rror" in line or "Traceback" in line:
                self._keep_error(line)
        return len(batch)

    def _note_foreign(self, line: str, index: int, *, outranks: bool = False) -> None:
        known = self._foreign is not None and self._foreign[0].outranks >= outranks
        if not known and (foreign := foreign_of(line[:LONGEST_ERROR], outranks=outranks)):
            self._foreign = foreign, self.lines + index + 1

    def _read(self, batch: list[str], start: int) -> None:
        """Read the lines that a rule is about. A search of the whole text finds the few rules that are."""
        text = "\n".join(batch)
        marks = [mark for mark in (*self._dialect().rules, "rror") if mark in text]
        marked = {index for mark in marks for index, line in enumerate(batch) if mark in line}
        for index in sorted(index for index in marked if index >= start):
            line = batch[index]
            if self.dialect is MEGATRON_LM and megatron_bridge.DIALECT.speaks(plain(line)):
                self._turn_to_bridge()
            if (fields := self._dialect().read_line(line)) is not None:
                if fields.step is not None and len(self.contents.steps) < FIRST_STEPS:
                    self._note_foreign(line, index, outranks=True)
                self.contents.add(fields, self.lines + index + 1)
            elif "rror" in line:
                self._keep_error(line)

    def _dialect(self) -> Dialect:
        assert self.dialect is not None
        return self.dialect

    def _turn_to_bridge(self) -> None:
        """Two ranks of Megatron-Bridge print its own line and Megatron-LM's, in any order: keep the settings that it printed."""
        self.dialect = megatron_bridge.DIALECT
        if settings := self._candidates.get(self.dialect):
            self.contents.add_settings(settings)

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
        foreign = self._foreign[0] if self._foreign is not None else None
        lines = self.failure_lines()
        quoted = any(FENCE.match(line) for line in lines)
        failed = cause is not None and not quoted and any(PRINTED.search(plain(line).strip()) for line in lines)
        begun = bool(self.contents.steps) or self.contents.run is not None
        if self.dialect is not None and (begun or failed) and not (foreign and foreign.outranks):
            return self.dialect
        if self._foreign is not None and not (failed and self._foreign[0].beside):
            raise self._not_read(*self._foreign)
        if self.lines == 0:
            raise RecordError(
                f"{self.name} holds no line that can be read.",
                where=self.name,
                fix="the console output of the rank that prints steps",
            )
        likeliest = self._likeliest() if self.dialect is None else None
        if quoted or (likeliest is None and not failed):
            raise self._unrecognised()
        return likeliest

    def _likeliest(self) -> Dialect | None:
        """Take the dialect that reads most settings from a log without steps; None where no line is a setting of any.

        Primus and Megatron-Bridge print Megatron-LM's settings too, so Megatron-LM comes before them where they read as many.
        """
        read = {one: len(contents.evidence) + len(contents.arguments) for one, contents in self._candidates.items()}
        likeliest = max(read, key=lambda one: (read[one], one is MEGATRON_LM), default=None)
        if likeliest is None or not read[likeliest]:
            return None
        self.dialect, self.contents = likeliest, self._candidates[likeliest]
        return likeliest

    def _not_read(self, foreign: Foreign, line: int) -> RecordError:
        return RecordError(
            f"{self.name} looks like a log of {foreign.name}, whose steps are not read.",
            where=f"{self.name}:{line}",
            why=foreign.why,
            fix=foreign.fix or f"a log of one of {', '.join(NAMES)}",
        )

    def _unrecognised(self) -> RecordError:
        signs = "\n".join(f"{dialect.name}: " + " or ".join(" … ".join(sign) for sign in dialect.signs) for dialect in DIALECTS)
        return RecordError(
            f"{self.name} holds no training step of a known framework.",
            where=self.name,
            why=f"No line holds any of these:\n{signs}",
            fix="the log of the rank that prints steps (the last rank, on the last node, for Megatron and Primus)",
        )
