"""Name the cause of a failed run in one line, from its exit code, its log and its steps.

data/failures.yaml has what logs say.
"""

import re
import signal
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, takewhile

from tprimat.core.rows import DATA, RefuseUnknownKeys, document, read_rows
from tprimat.logs.fields import ESCAPES
from tprimat.records.schema import Failure, Outcome, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature(RefuseUnknownKeys):
    """One class of failures. `cause` and `hint` may contain {groups} of a pattern and {line}."""

    name: str
    outcome: Outcome
    patterns: tuple[str, ...]
    cause: str
    hint: str | None = None
    retry: bool = False
    source: str
    """Who prints such lines."""

    def match(self, line: str) -> re.Match[str] | None:
        """Return the match of the first pattern that the line has."""
        return next((match for pattern in self.patterns if (match := re.search(pattern, line))), None)


@cache
def signatures(section: str) -> tuple[Signature, ...]:
    """Return `causes` by priority, their `consequences` on other ranks, or `echoes`, than which any other error is better."""
    return read_rows("failures.yaml", section, Signature)


@cache
def harmless() -> re.Pattern[str]:
    """Return the pattern of lines that look like errors and are none."""
    return re.compile("|".join(document(DATA / "failures.yaml")["harmless"]))


GPU_MEMORY = re.compile(
    r"(?:HIP|CUDA) out of memory\. Tried to allocate (?P<size>[\d.]+ [KMGT]?i?B)"
    r"(?:.*?GPU (?P<gpu>\d+) has a total capac?i?ty of (?P<capacity>[\d.]+ [KMGT]?i?B)"
    r" of which (?P<free>[\d.]+ [KMGT]?i?B|\d+ bytes) is free)?"
)
ROOT_CAUSE = "Root Cause (first observed failure)"
EXCEPTION = re.compile(
    r"(?:^|\] *(?:: *)?|\s)(?P<text>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Failure)(?:: .*)?)$"
)
RAISED_WARNING = re.compile(r"(?:\[rank\d+\]:\s*)?(?P<text>(?:[A-Za-z_]\w*\.)*[A-Z]\w*Warning: .*)$")
"""Under PYTHONWARNINGS=error, at the start of the line below a frame; those that are printed have their file before them."""
FRAME = re.compile(r"(?:\[rank\d+\]:\s*)?File \".*\", line \d+")
RANK_MARK = re.compile(r"^\[rank\d+\]:\s*")
ASSERT = re.compile(r"assert .+")
LINES_OF_A_FRAME = 3
"""The file, its source, and marks below it."""
WRAPPERS = re.compile(r"ChildFailedError|Training execution failed: |^\[Primus\] Error: ")
UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
MAX_CAUSE_CHARACTERS = 300
LIMIT_SECONDS, WARNING_SECONDS = 10.0, 900.0
"""How long before its time limit a scheduler's SIGTERM, or the warning that a user asked for, is about that limit."""
CRASHES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
"""Signals that are a cause by themselves. Not SIGABRT: NCCL's watchdog aborts a process and logs why."""
LOSS_GROWTH = 1.5
"""An untrained model starts with a loss of about log(vocabulary); only a diverging run climbs this far above it."""


def classify(
    exit_code: int | None, lines: Iterable[str], steps: Sequence[StepRecord], *, oom_killed: bool = False
) -> Failure | None:
    """Find the cause of death of a run that the launcher did not stop.

    Searches torchrun's root-cause block first, then the log of the rank that it names, then the whole log. Within each, classes
    are tried in the order of failures.yaml, and the earliest line of a class is taken. An exception of the rank that failed first
    comes before what any other process says.

    Args:
        exit_code: of the process; a negative number is a signal. Shells report 128 plus the signal number.
        lines: of the log and of the ranks' own logs.
        steps: the steps that were measured.
        oom_killed: whether the kernel counted an out-of-memory kill during the run.

    Returns:
        None if the run completed.
    """
    if exit_code == 0:
        return unfinished(steps) or diverging(steps)
    texts = meaningful(lines)
    block = root_cause_block(texts)
    first_rank = of_rank(texts, block)
    number = signal_of(exit_code, block)
    return (
        search("causes", block)
        or search("causes", first_rank)
        or own_exception(first_rank)
        or search("causes", texts)
        or ended_by(number, CRASHES, oom_killed)
        or search("consequences", first_rank)
        or last_exception(first_rank)
        or search("consequences", texts)
        or diverging(steps)
        or last_exception(texts)
        or search("echoes", texts)
        or ended_by(number, set(signal.Signals))
        or last_line(exit_code, texts)
    )


AGAIN = "the same command with --resume makes this run again, and skips those that have ended"


def stopped_by(name: str, seconds_left: float | None) -> Failure:
    """Return why a run ended that its launcher stopped because of a signal.

    Args:
        name: of the signal, such as SIGTERM.
        seconds_left: until the scheduler's time limit; None if there is none or it is unknown.
    """
    margin = WARNING_SECONDS if name in {"SIGUSR1", "SIGUSR2"} else LIMIT_SECONDS
    if seconds_left is None or seconds_left > margin or name in {"SIGINT", "SIGHUP"}:
        return Failure(outcome="interrupted", cause=f"Stopped by {name}.", hint=AGAIN)
    when = f"{seconds_left:.0f} s before" if seconds_left > 0 else "at"
    cause = f"The scheduler's time limit: {name} came {when} the end of the job."
    return Failure(outcome="timed_out", cause=cause, hint=f"ask for more time, or fewer steps; {AGAIN}", cut_off=True)


def earliest(failures: Sequence[tuple[Failure, Sequence[str]]]) -> Failure:
    """Return which of the failures of several nodes came first: causes before consequences, then by torchrun's own times.

    Each is what a node's log says, with its lines; at least one, the most likely first.
    """
    return min(failures, key=lambda pair: (is_consequence(pair[0]), failed_at(pair[1])))[0]


def is_consequence(failure: Failure) -> bool:
    """Return whether a failure is how ranks end after one of them, perhaps on another node, has ended."""
    names = {signature.name for section in ("consequences", "echoes") for signature in signatures(section)}
    text = f"{failure.cause} {failure.evidence or ''}"
    return failure.kind in names or failure.outcome == "interrupted" or is_echo(text)


def is_echo(text: str) -> bool:
    """Return whether a line only shows that another rank has ended."""
    return any(echo.match(text) for echo in signatures("echoes"))


def failed_at(lines: Iterable[str]) -> str:
    """Return when the first rank of a node failed, as torchrun writes it (2026-01-01_00:00:00); lines without it sort last."""
    times = (re.match(r"time\s*: ([\d_:-]+)", line) for line in root_cause_block(meaningful(lines)))
    return next((match[1] for match in times if match), "~")


def add_log_hint(stopped: Failure, lines: Iterable[str]) -> Failure:
    """Add an error in the log to the failure of a run that we stopped; our own signal does not count as one."""
    texts = meaningful(lines)
    failure = search("causes", texts) or search("consequences", texts, without="stopped_by_signal")
    if failure is None or failure.evidence is None:
        return stopped
    cause = shortened(f"{stopped.cause} The log says: {failure.evidence}")
    return replace(stopped, cause=cause, evidence=failure.evidence, hint=failure.hint or stopped.hint)


def meaningful(lines: Iterable[str]) -> list[str]:
    """Remove control sequences, empty lines and harmless lines that look like errors."""
    texts = (ESCAPES.sub("", line).strip() for line in lines)
    return [text for text in texts if text and not harmless().search(text)]


def unfinished(steps: Sequence[StepRecord]) -> Failure | None:
    """Return a failure if the run ended without a single step."""
    if steps:
        return None
    return Failure(
        outcome="failed", cause="The process ended without an error and without a single step.", hint="the log may show why"
    )


def ended_early(steps: Sequence[StepRecord], planned: int) -> Failure | None:
    """Return a failure if a process that reports success has not reached its last planned step. There is at least one step.

    A framework that logs every tenth step may end up to nine steps after its last line.
    """
    last = steps[-1].step
    interval = last - steps[-2].step if len(steps) > 1 else last
    if last + interval > planned:
        return None
    cause = f"The process ended with exit status 0 after step {last} of {planned}."
    return Failure(outcome="failed", cause=cause, hint="the log may show why; what was measured is kept")


def diverging(steps: Sequence[StepRecord]) -> Failure | None:
    """Return a failure if the loss is not finite at the end, or ended far above its start."""
    hint = "lower the learning rate, lengthen the warm-up, or use bf16 instead of fp8"
    if steps and not steps[-1].finite:
        first = next(step.step for step in steps if not step.finite)
        return Failure(
            outcome="diverged", cause=f"The loss or the gradient norm is not finite, first in step {first}.", hint=hint
        )
    first_losses = list(islice((step.loss for step in steps if step.loss is not None), 10))
    last_losses = list(islice((step.loss for step in reversed(steps) if step.loss is not None), 3))
    if len(first_losses) < 10 or (last := statistics.median(last_losses)) <= LOSS_GROWTH * first_losses[0]:
        return None
    return Failure(outcome="diverged", cause=f"The loss grew from {first_losses[0]:.4g} to {last:.4g}.", hint=hint)


def root_cause_block(lines: Sequence[str]) -> list[str]:
    """Return torchrun's lines about the rank that failed first."""
    starts = [index for index, line in enumerate(lines) if ROOT_CAUSE in line]
    if not starts:
        return []
    rest = lines[starts[-1] + 1 :]
    ends = (index for index, line in enumerate(rest) if "=====" in line)
    return list(rest[: next(ends, 40)])


def of_rank(lines: Sequence[str], block: Sequence[str]) -> list[str]:
    """Return the lines of the rank that the block names, marked [rank3]: by torch or rank-3/8 by Primus."""
    ranks = [match[1] for line in block if (match := re.match(r"rank\s*: (\d+)", line))]
    if not ranks:
        return []
    marks = (f"[rank{ranks[0]}]", f"rank-{ranks[0]}/")
    return [line for line in lines if any(mark in line for mark in marks)]


def search(section: str, lines: Sequence[str], *, without: str = "") -> Failure | None:
    """Return the failure of the first matching signature of a section of failures.yaml, at its earliest line."""
    for signature in signatures(section):
        for line in lines if signature.name != without else ():
            if match := signature.match(line):
                return failure_of(signature, match, line, lines)
    return None


def failure_of(signature: Signature, match: re.Match[str], line: str, lines: Sequence[str]) -> Failure:
    """Fill the signature's texts with the details of the line."""
    words = {name: value or "" for name, value in match.groupdict().items()} | {"line": line}
    cause = (gpu_memory_cause(lines) if signature.name == "out_of_memory" else None) or signature.cause
    hint = signature.hint.format_map(words) if signature.hint else None
    return Failure(
        outcome=signature.outcome,
        cause=shortened(cause.format_map(words)),
        hint=worker_hint(line, lines) if signature.name == "worker_refused" else hint,
        evidence=shortened(line),
        kind=signature.name,
        retry=signature.retry,
    )


def worker_hint(line: str, lines: Sequence[str]) -> str | None:
    """Return the `try` row of a worker's own error, whose first line is followed by rows at, why, try (errors.UserError)."""
    rows = takewhile(re.compile("(?:at|why|try) +").match, lines[lines.index(line) + 1 :])
    return next((row.removeprefix("try").strip() for row in rows if row.startswith("try")), None)


def gpu_memory_cause(lines: Sequence[str]) -> str | None:
    """Describe the largest failed allocation and the memory that was free."""
    matches = [match for line in lines if (match := GPU_MEMORY.search(line))]
    if not matches:
        return None
    largest = max(matches, key=lambda match: as_bytes(match["size"]))
    text = f"The GPU ran out of memory: it tried to allocate {largest['size']}"
    if largest["gpu"] is not None:
        text += f" on GPU {largest['gpu']}, where {largest['free']} of {largest['capacity']} were free"
    return text + "."


def as_bytes(text: str) -> float:
    """Convert '3.31 GiB' to bytes."""
    number, unit = text.split()
    return float(number) * UNITS.get(unit, 1)


def signal_of(exit_code: int | None, block: Sequence[str]) -> int | None:
    """Return the signal that ended the first rank, or the process itself."""
    for line in block:
        if match := re.search(r"exitcode\s*: -(\d+)", line):
            return int(match[1])
    if exit_code is None:
        return None
    if exit_code < 0:
        return -exit_code
    return exit_code - 128 if 128 < exit_code <= 128 + 64 else None


def ended_by(number: int | None, signals: Collection[int], oom_killed: bool = False) -> Failure | None:
    """Explain a signal that ended the first process, where it is one of `signals`; None otherwise.

    SIGKILL comes from outside and leaves no message; the kernel counts those for memory (`oom_killed`).
    """
    if number is None or number not in signals:
        return None
    name = "stopped" if number in {signal.SIGTERM, signal.SIGINT, signal.SIGHUP} else "crashed"
    if number == signal.SIGKILL:
        name = "killed_for_memory" if oom_killed else "killed"
    (ending,) = (one for one in signatures("signals") if one.name == name)
    return Failure(outcome=ending.outcome, cause=ending.cause.format(signal=signal.Signals(number).name), hint=ending.hint)


def last_exception(lines: Sequence[str]) -> Failure | None:
    """Return the last exception that matches no signature, ignoring wrappers and echoes of another rank's death."""
    for index in reversed(range(len(lines))):
        line = lines[index]
        if WRAPPERS.search(line) or is_echo(line):
            continue
        below_frame = any(map(FRAME.match, lines[max(0, index - LINES_OF_A_FRAME) : index]))
        if match := EXCEPTION.search(line) or (RAISED_WARNING.match(line) if below_frame else None):
            text = shortened(match["text"] + more_of_exception(match["text"], lines, index))
            return Failure(outcome="failed", cause=text, hint="the log has the whole traceback", evidence=shortened(line))
    return None


def more_of_exception(text: str, lines: Sequence[str], index: int) -> str:
    """Return what the line of an exception leaves out: the next line after a colon, the condition of an assert without a text."""
    if text.endswith(":"):
        following = lines[index + 1] if index + 1 < len(lines) else ""
        return f" {RANK_MARK.sub('', following).strip()}"
    if ":" not in text:
        for line in reversed(lines[max(0, index - LINES_OF_A_FRAME) : index]):
            if match := ASSERT.match(RANK_MARK.sub("", line)):
                return f": {match[0]}"
    return ""


def own_exception(lines: Sequence[str]) -> Failure | None:
    """Return the exception of the rank that failed first, unless it only shows that another rank had trouble before."""
    failure = last_exception(lines)
    return None if failure is None or is_consequence(failure) or search("consequences", lines) else failure


def last_line(exit_code: int | None, lines: Sequence[str]) -> Failure:
    """Fall back to the exit code and the last line."""
    cause = f"The process ended with exit code {exit_code}"
    if not lines:
        return Failure(outcome="failed", cause=f"{cause} and printed nothing.")
    last = shortened(lines[-1])
    return Failure(outcome="failed", cause=f"{cause}; its last line: {last}", hint="the log may show more", evidence=last)


def shortened(text: str) -> str:
    """Join the text to one line of at most MAX_CAUSE_CHARACTERS."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_CAUSE_CHARACTERS else line[: MAX_CAUSE_CHARACTERS - 1] + "…"
