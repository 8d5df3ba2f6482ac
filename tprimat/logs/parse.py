"""A training log read line by line: its dialect recognized, its fields collected by attempt, lines about errors kept."""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

from tprimat.core.accelerators import Backend
from tprimat.core.errors import RecordError
from tprimat.core.rows import DATA, RefuseUnknownKeys, document, read_rows
from tprimat.logs.contents import Attempts, LogContents
from tprimat.logs.failures import TRACEBACK, cause_in, last_exception, meaningful, pattern_of, search
from tprimat.logs.fields import LINES, MOST, Dialect, LineFields, count, number, plain, scaled, whole
from tprimat.logs.formats import deepspeed, maxtext, torchtitan
from tprimat.logs.formats.megatron import BRIDGE, MEGATRON_LM, NEMO, PRIMUS, TPRIMAT
from tprimat.records.schema import Failure, StepRecord

DIALECTS: tuple[Dialect, ...] = (
    TPRIMAT,
    PRIMUS,
    BRIDGE,
    MEGATRON_LM,
    NEMO,
    torchtitan.DIALECT,
    maxtext.DIALECT,
    deepspeed.DIALECT,
)
"""Specific ones before general ones: Primus and Megatron-Bridge print Megatron-LM's line with additions."""
NAMES = tuple(dialect.name for dialect in DIALECTS)
RANK, DECIMAL_COMMA = re.compile(r"\[rank(\d+)\]:"), re.compile(LINES["decimal_comma"])


@cache
def words_of(section: str) -> tuple[str, ...]:
    """Return words of data/failures.yaml: `loud` lines are about errors, those of `starts` begin a process."""
    return tuple(document(DATA / "failures.yaml")[section])


def dialect_of(text: str) -> Dialect | None:
    """Return the dialect of one line; None for lines that any framework may print."""
    text = plain(text)
    return next((dialect for dialect in DIALECTS if dialect.speaks(text)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign(RefuseUnknownKeys):
    """A framework whose steps are not read."""

    name: str
    pattern: str
    """Of its lines."""
    why: str = "Nothing here reads its lines."
    fix: str | None = None
    """What its user can do instead."""
    step: str | None = None
    """Pattern of the number of a step, and where it says so their total."""
    beside: bool = False
    """It prints beside another framework, whose failure before the first step counts."""
    outranks: bool = False
    """Its lines look like those of a framework that is read."""
    source: str


@cache
def _foreign_frameworks() -> tuple[Foreign, ...]:
    return read_rows("other_frameworks.yaml", "frameworks", Foreign)


@dataclass(frozen=True, slots=True)
class Device:
    """What a line shows of the devices that ran."""

    platform: str
    """cuda, rocm or another; empty: not shown."""
    name: str | None
    gib: float | None
    share: bool
    """The memory is a share that the program may use."""

    @property
    def backend(self) -> Backend | None:
        """The platform as records name it."""
        named: dict[str, Backend | None] = {"": None, "cuda": "cuda", "rocm": "rocm"}
        return named.get(self.platform, "other")


@cache
def device_patterns() -> tuple[tuple[str, re.Pattern[str], str], ...]:
    """Return words of a line, its pattern and the platform that it shows, by data/log_lines.yaml."""
    rows = document(DATA / "log_lines.yaml")["devices"]
    return tuple((row["words"], re.compile(row["pattern"]), row.get("platform", "")) for row in rows)


def _device_of(line: str) -> Device | None:
    for words, pattern, platform in device_patterns():
        if words in line and (match := pattern.search(line)):
            facts = match.groupdict()
            gib = scaled(number(facts.get("mib")), 1 / 1024) or number(facts.get("gib") or facts.get("limit"))
            used, percent = number(facts.get("used")), number(facts.get("percent"))
            if used and percent and percent > 5:  # of which the total follows with enough digits
                gib = 100 * used / percent
            return Device(platform, facts.get("name"), gib, "limit" in facts)
    return None


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt before the last one."""

    contents: LogContents
    failure: Failure | None
    kept: Sequence[tuple[int, str]]


@dataclass(slots=True)
class LogReading:
    """The state of reading one log."""

    name: str
    """For messages: a path, or standard input."""
    dialect: Dialect | None = None
    """None until a line shows it."""
    attempts: Attempts = field(default_factory=Attempts)
    ended: list[Ended] = field(default_factory=list)
    """The attempts before the last one."""
    lines: int = 0
    devices: dict[int, Device] = field(default_factory=dict)
    """Number of a line -> what it shows of the devices, each thing once."""
    _tail: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=MOST["last_lines"]))
    """The last lines, with their numbers."""
    _kept: list[tuple[int, str]] = field(default_factory=list)
    """Lines about errors, and those after them."""
    _loud: int = -MOST["context"]
    """Number of the last line about an error."""
    _steps: tuple[int, int] = (0, 0)
    """Numbers of the lines of the last step but one, before which no error is the end of the run, and of the last."""
    _candidates: dict[Dialect, Attempts] = field(default_factory=dict)
    """What each dialect has read before the first line that shows the log's own."""
    _foreign: tuple[Foreign, int] | None = None
    """The first line of a framework whose steps are not read, and its number."""
    _foreign_step: tuple[int, int | None] = (0, None)
    """Its last step, and the number of all."""

    @property
    def contents(self) -> LogContents:
        """What the last attempt with steps has stated."""
        return self.attempts.measured

    def add(self, batch: list[str]) -> None:
        """Take in whole lines. Until the dialect is known, every dialect reads them."""
        for index in self._telling(batch):
            self._read(batch[index], self.lines + index + 1)
        self.lines += len(batch)
        last = batch[-MOST["last_lines"] :]
        self._tail.extend((self.lines - len(last) + number, line[: MOST["letters"]]) for number, line in enumerate(last, 1))

    def _telling(self, batch: list[str]) -> Sequence[int]:
        """Return the lines that may say something. A search of the whole text finds the few words that are in any line."""
        if self.dialect is None:
            return [index for index, line in enumerate(batch) if line and not line.isspace()]
        text = "\n".join(batch)
        marks = [
            mark for mark in (*self.dialect.rules, *words_of("starts"), *(row[0] for row in device_patterns())) if mark in text
        ]
        loud = [word for word in words_of("loud") if word in text]
        telling = {index for mark in marks for index, line in enumerate(batch) if mark in line}
        errors = {index for word in loud for index, line in enumerate(batch) if word in line} | {self._loud - self.lines - 1}
        after = {other for index in errors for other in range(index, index + MOST["context"])}
        return sorted(telling | {index for index in after if 0 <= index < len(batch)})

    def _read(self, line: str, number: int) -> None:
        """Read a line, and keep it where it is about an error."""
        if any(word in line for word in words_of("starts")):
            last = self.attempts.latest
            if last.steps or self._died(number):  # else the line is of the attempt that has only begun
                self.attempts.begin(with_settings=True)
                self._end(last, number)
        fields = self._fields(line, number)
        if fields is not None:
            self._take(fields, number)
            if fields.step is not None and (rank := RANK.search(line)):
                self.attempts.latest.ranks = max(self.attempts.latest.ranks, count(rank[1]) + 1)
            if fields.step is not None and DECIMAL_COMMA.search(plain(line)):
                what = f"{self.name} has decimal commas, which no framework prints."
                raise RecordError(what, where=f"{self.name}:{number}", fix="the log as it was printed")
        if (device := _device_of(line)) and device not in self.devices.values():
            self.devices[number] = device
        if any(word in line for word in words_of("loud")):
            self._loud = number
        if number < self._loud + MOST["context"] and line.strip() and not _is_step(fields) and len(self._kept) < MOST["kept"]:
            self._kept.append((number, line[: MOST["letters"]]))

    def _fields(self, line: str, number: int) -> LineFields | None:
        """Return the fields of a line in the log's dialect, which it may be the first to show."""
        if self.dialect is None and (dialect := dialect_of(line)):
            self.dialect, self.attempts = dialect, self._candidates.pop(dialect, self.attempts)
        if self.dialect is None:
            for candidate in DIALECTS:
                if fields := candidate.read_line(line):
                    self._candidates.setdefault(candidate, Attempts()).add(fields, number)
            self._note_foreign(line, number)
            step = re.search(self._foreign[0].step, line) if self._foreign and self._foreign[0].step else None
            if step is not None and (reached := count(step["step"])) != self._foreign_step[0]:
                self._foreign_step = reached, whole(step.groupdict().get("total"))
                self._step(number)
            return None
        fields = self.dialect.read_line(line)
        if fields is not None and self.dialect is MEGATRON_LM and BRIDGE.speaks(plain(line)):
            # Two ranks of Megatron-Bridge print its own line and Megatron-LM's, in any order: keep the settings that it printed.
            self.dialect = BRIDGE
            if settings := self._candidates.get(self.dialect):
                self.attempts.latest.add_settings(settings.latest)
        if fields is not None and fields.step is not None and len(self.contents.steps) < MOST["first_steps"]:
            self._note_foreign(line, number, outranks=True)
        return fields

    def _note_foreign(self, line: str, number: int, *, outranks: bool = False) -> None:
        known = self._foreign is not None and self._foreign[0].outranks >= outranks
        candidates = (one for one in _foreign_frameworks() if one.outranks or not outranks)
        if not known and (foreign := next((one for one in candidates if re.search(one.pattern, line[: MOST["letters"]])), None)):
            self._foreign = foreign, number

    def _take(self, fields: LineFields, number: int) -> None:
        """Take in the fields of a line, which may be the first of an attempt."""
        last, newest, former = self.attempts.latest, self.attempts.latest.newest, len(self.attempts.former)
        self.attempts.add(fields, number)
        if len(self.attempts.former) > former:
            self._end(last, number)
        elif len(self.attempts.former) < former and self.ended:  # it goes on after all
            self._kept = [*self.ended.pop().kept, *self._kept]
        elif self.attempts.latest.newest != newest:
            self._step(number)

    def _step(self, number: int) -> None:
        """Note the line of a new step: an error that two of them follow was no end, but that of an attempt where a job ended."""
        self._steps = self._steps[1], number
        passed = [kept for kept in self._kept if kept[0] < self._steps[0]]
        self._kept = self._kept[len(passed) :]
        if ends := [line for line, text in passed if pattern_of("ends").search(text)]:
            self.ended.append(Ended(self.attempts.split(ends[-1]), self._cause(text for _, text in passed), passed))

    def _died(self, number: int) -> bool:
        """Whether the lines before this one tell of the end of a process before its first step."""
        texts = meaningful(line for _, line in self._kept)
        near = bool(self._kept) and self._kept[-1][0] >= number - MOST["near"]
        return any(map(pattern_of("deaths").search, texts)) or (near and last_exception(texts[-MOST["near"] :]) is not None)

    def _end(self, last: LogContents, number: int) -> None:
        self.ended.append(Ended(last, self._cause(line for _, line in self._kept), self._kept))
        self._kept, self._steps = [], (number, number)

    def _cause(self, lines: Iterable[str], steps: Sequence[StepRecord] = ()) -> Failure | None:
        """Return what lines about errors tell of, with the word for the devices that ran."""
        failure = cause_in(meaningful(lines), steps)
        word = next((device.platform.upper() for device in self.devices.values() if device.backend == "other"), "GPU")
        return failure and replace(failure, cause=failure.cause.replace("The GPU ran", f"The {word} ran"))

    def failure_lines(self) -> list[str]:
        """Return the lines that may name the cause of a failure, in the order of the log, without those that steps followed."""
        since = self._steps[0]
        kept = {number: line for number, line in (*self._kept, *self._tail) if number >= since}
        dialect = self.dialect
        return [line for _, line in sorted(kept.items()) if dialect is None or not _is_step(dialect.read_line(line))]

    def failure(self, steps: Sequence[StepRecord]) -> Failure | None:
        """Return why the last attempt failed; None where the log does not say."""
        texts = meaningful(self.failure_lines())
        failure = self._cause(texts, steps)
        raised = any(TRACEBACK in text for text in texts) or last_exception(texts[-MOST["near"] :])
        if failure and (failure.kind or raised):
            return failure
        unnamed = None if self.contents.steps or self._foreign else search("unnamed", texts[-2 * MOST["near"] :])
        return unnamed and (failure or unnamed)

    def foreign_ending(self) -> Failure | None:
        """Return how a run ended whose steps are not read; None where the log does not tell."""
        step, total = self._foreign_step
        if self._foreign is None or any(map(pattern_of("fences").match, self.failure_lines())):
            return None
        if (failure := self.failure(())) or not step or step == total:
            return failure
        planned = "" if total is None else f" of {total}"
        return Failure(outcome="interrupted", cause=f"The log ends after step {step}{planned} without saying why.")

    def check(self, failure: Failure | None) -> Dialect | None:
        """Return the dialect of a training log; None where the run failed, as `failure` says, before a line showed the framework.

        Raises RecordError: the log is not that of a training run: no step, no cause and no framework's settings.
        """
        runs = [list(one.steps.values()) for one in (*self.attempts.former, self.attempts.latest) if one.steps]
        back = [later[0].step for one, later in pairwise(runs) if len(one) < 3 and later[0].line - one[-1].line <= MOST["near"]]
        if len(back) > MOST["attempts"]:
            why, fix = "Several runs or ranks wrote into it at once.", "the log of one of them"
            if back == sorted(back, reverse=True):
                why, fix = "Its lines are newest first.", "tac FILE | the same command with --log-file -"
            raise RecordError(
                f"The steps of {self.name} go back {len(back)} times.", where=f"{self.name}:{runs[1][0].line}", why=why, fix=fix
            )
        foreign = self._foreign[0] if self._foreign is not None else None
        prose = any(map(pattern_of("fences").match, self.failure_lines())) or pattern_of("prose").search(
            (failure and failure.evidence) or ""
        )
        failed = failure is not None and not prose
        begun = bool(self.contents.steps) or self.contents.run is not None
        if self.dialect is not None and (begun or failed) and not (foreign and foreign.outranks):
            return self.dialect
        if foreign is not None and self._foreign is not None and not (failed and foreign.beside):
            raise RecordError(
                f"{self.name} looks like a log of {foreign.name}, whose steps are not read.",
                where=f"{self.name}:{self._foreign[1]}",
                why=foreign.why,
                fix=foreign.fix or f"a log of one of {', '.join(NAMES)}",
            )
        likeliest = self._likeliest() if self.dialect is None else None
        if prose or (likeliest is None and not failed):
            written = f"of {self.dialect.name} has a step's number" if self.dialect else f"comes from {', '.join(NAMES)}"
            raise RecordError(
                f"{self.name} holds no training step of a known framework.",
                where=self.name,
                why=f"None of its {self.lines:,} lines {written}.",
                fix="the log of the rank that prints steps (the last rank, on the last node, for Megatron), with whole lines",
            )
        return likeliest

    def _likeliest(self) -> Dialect | None:
        """Take the dialect that reads most settings from a log without steps; None where no line is a setting of any.

        Primus and Megatron-Bridge print Megatron-LM's settings too, so Megatron-LM comes before them where they read as many.
        """
        read = {one: len(seen.latest.evidence) + len(seen.latest.arguments) for one, seen in self._candidates.items()}
        likeliest = max(read, key=lambda one: (read[one], one is MEGATRON_LM), default=None)
        if likeliest is None or not read[likeliest]:
            return None
        self.dialect, self.attempts = likeliest, self._candidates[likeliest]
        return likeliest


def _is_step(fields: LineFields | None) -> bool:
    return fields is not None and fields.step is not None
