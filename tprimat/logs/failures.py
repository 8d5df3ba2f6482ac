"""Name the cause of a failed run in one line, from its exit code, log and steps. data/failures.yaml has what logs say."""

import re
import signal
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, takewhile
from typing import Literal

from tprimat.core.rows import DATA, RefuseUnknownKeys, document, read_rows
from tprimat.core.units import gibibytes
from tprimat.logs.fields import ESCAPES, MOST, count
from tprimat.records.schema import Failure, Outcome, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature(RefuseUnknownKeys):
    """One class of failures. `cause` and `hint` may contain {groups} of a pattern and {line}."""

    name: str
    kind: str = ""
    """What it has in common with others; empty: its name."""
    outcome: Outcome
    memory: Literal["device", "host"] | None = None
    """Which memory ran out."""
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
def pattern_of(section: str) -> re.Pattern[str]:
    """Return the pattern of lines with any of a section's patterns, such as `harmless`: errors by their look alone."""
    return re.compile("|".join(document(DATA / "failures.yaml")[section]))


TRACEBACK = "Traceback (most recent call last)"
RANK_MARK = re.compile(r"^(?:\[rank\d+\]:\s*)+")
FRAME = re.compile(r'File "(?:[^"]*/)?([^"/]+)", line (\d+)')
ASSERT = re.compile(r"(?:^|[\])|:]\s+)(assert .+)")
RANK = re.compile(r"(?i)(?<!local )(?<!local_)\brank(?:id)?[ =:-]*(\d+)")
CRASHES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
"""Signals that are a cause by themselves. Not SIGABRT: NCCL's watchdog aborts a process and logs why."""


def classify(
    exit_code: int | None, lines: Iterable[str], steps: Sequence[StepRecord], *, oom_killed: bool = False
) -> Failure | None:
    """Find why a run died that the launcher did not stop, by the lines of its log and of its ranks' own; None: it completed.

    A negative exit code is a signal; shells report 128 plus its number. `oom_killed`: the kernel counted an out-of-memory kill
    during the run.
    """
    if exit_code == 0:
        nothing = "The process ended without an error and without a single step."
        return diverging(steps) if steps else Failure(outcome="failed", cause=nothing, hint="the log may show why")
    texts = meaningful(lines)
    return cause_in(texts, steps, exit_code, oom_killed) or _last_line(exit_code, texts)


def cause_in(
    texts: Sequence[str], steps: Sequence[StepRecord], exit_code: int | None = None, oom_killed: bool = False
) -> Failure | None:
    """Return the failure that meaningful lines, steps or an exit code tell of; None where none does.

    Searches torchrun's root-cause block first, then the log of the rank that it names, then the whole log. Within each, classes
    are tried in the order of failures.yaml, and the earliest line of a class is taken. An exception of the rank that failed first
    comes before what any other process says, and any exception before what ranks say that wait for another.
    """
    block = _root_cause_block(texts)
    first_rank = [*block, *of_rank(texts, block)]
    number, own = signal_of(exit_code, block, texts), last_exception(first_rank)
    failure = (
        search("causes", first_rank)
        or (own if own and not is_consequence(own) and not search("consequences", first_rank) else None)
        or search("causes", texts)
        or ended_by(number, CRASHES, oom_killed)
        or search("consequences", first_rank)
        or own
        or last_exception([text for text in texts if not tells_only(text, "consequences", "echoes")])
        or search("consequences", texts)
        or diverging(steps)
        or last_exception(texts)
        or search("echoes", [*block, *texts])
        or ended_by(number, set(signal.Signals))
    )
    place = place_of(facts_of(block)) or place_of(task_of(texts))
    if (
        failure is None
        or place is None
        or failure.kind in {"worker_refused", "scheduler_limit"}
        or failure.outcome == "interrupted"
    ):
        return failure
    return replace(failure, hint="; ".join(filter(None, (failure.hint, f"{place} failed first"))))


AGAIN = "the same command with --resume makes this run again, and skips those that have ended"


def stopped_by(name: str, seconds_left: float | None) -> Failure:
    """Return why a run ended that its launcher stopped because of a signal, by the time until the scheduler's limit, if known."""
    margin = 900 if name in {"SIGUSR1", "SIGUSR2"} else 10  # a warning that a user asked for comes earlier than SIGTERM
    if seconds_left is None or seconds_left > margin or name in {"SIGINT", "SIGHUP"}:
        return Failure(outcome="interrupted", cause=f"Stopped by {name}.", hint=AGAIN)
    when = f"{seconds_left:.0f} s before" if seconds_left > 0 else "at"
    cause = f"The scheduler's time limit: {name} came {when} the end of the job."
    return Failure(outcome="timed_out", cause=cause, hint=f"ask for more time, or fewer steps; {AGAIN}", cut_off=True)


def earliest(failures: Sequence[tuple[Failure, Sequence[str]]]) -> Failure:
    """Return which of the failures of several nodes came first: causes before consequences, then by torchrun's own times.

    Each is what a node's log says, with its lines; at least one, the most likely first.
    """
    # torchrun writes when the first rank of a node failed (2026-01-01_00:00:00); lines without it sort last.
    when = [facts_of(_root_cause_block(meaningful(lines))).get("time", "~") for _, lines in failures]
    return min(zip(failures, when, strict=True), key=lambda pair: (is_consequence(pair[0][0]), pair[1]))[0][0]


def is_consequence(failure: Failure) -> bool:
    """Return whether a failure is how ranks end after one of them, perhaps on another node, has ended."""
    names = {signature.name for section in ("consequences", "echoes") for signature in signatures(section)}
    told = tells_only(f"{failure.cause} {failure.evidence or ''}", "echoes")
    return told or failure.kind in names or failure.outcome == "interrupted"


def tells_only(text: str, *sections: str) -> bool:
    """Return whether a line only shows that a rank waits for another (`consequences`), or that another has ended (`echoes`)."""
    return any(one.match(text) for section in sections for one in signatures(section))


def add_log_hint(stopped: Failure, lines: Iterable[str]) -> Failure:
    """Add an error in the log to the failure of a run that we stopped; our own signal does not count as one."""
    texts = meaningful(lines)
    failure = search("causes", texts) or search("consequences", texts, without="stopped_by_signal")
    if failure is None or failure.evidence is None:
        return stopped
    cause = _shortened(f"{stopped.cause} The log says: {failure.evidence}")
    return replace(stopped, cause=cause, evidence=failure.evidence, hint=failure.hint or stopped.hint)


def meaningful(lines: Iterable[str]) -> list[str]:
    """Remove control sequences, empty lines, harmless lines that look like errors, and tracebacks that Python passed over."""
    texts: list[str] = []
    passed_over = 0
    for text in (pattern_of("progress").sub("", ESCAPES.sub("", line[: MOST["read_letters"]])).strip() for line in lines):
        if "Exception ignored in" in text:  # a traceback that Python passes over, such as that of a destructor
            passed_over = MOST["traceback"]
        elif passed_over:
            passed_over = 0 if pattern_of("exceptions").search(text) else passed_over - 1
        elif text and not pattern_of("harmless").search(text):
            before_reason = texts and texts[-1].endswith(("Last error:", "Inner Error!"))  # of NCCL and CANN
            texts.append(f"{texts.pop()} {RANK_MARK.sub('', text)}" if before_reason else text)
    return texts


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
    """Return a failure if the loss is not finite in the last two steps, or ended far above its start, about log(vocabulary).

    One step alone may be one that fp16's loss scaling skips.
    """
    cause = ""
    if steps and not any(step.finite for step in steps[-2:]):
        first = next(step.step for step in steps if not step.finite)
        cause = f"The loss or the gradient norm is not finite, first in step {first}."
    first_losses = list(islice((step.loss for step in steps if step.loss is not None), 10))
    last_losses = list(islice((step.loss for step in reversed(steps) if step.loss is not None), 3))
    # Only a diverging run climbs so far above where an untrained model starts.
    if not cause and len(first_losses) == 10 and (last := statistics.median(last_losses)) > 1.5 * first_losses[0]:
        cause = f"The loss grew from {first_losses[0]:.4g} to {last:.4g}."
    hint = "lower the learning rate, lengthen the warm-up, or use bf16 instead of fp8"
    return Failure(outcome="diverged", cause=cause, hint=hint, kind="diverged") if cause else None


def _root_cause_block(lines: Sequence[str]) -> list[str]:
    starts = [index for index, line in enumerate(lines) if "Root Cause (first observed failure)" in line]
    rest = lines[starts[-1] + 1 :] if starts else ()
    return list(islice(takewhile(lambda line: "=====" not in line, rest), MOST["traceback"]))


def facts_of(block: Sequence[str]) -> dict[str, str]:
    """Return the rows of torchrun's block, such as host, rank and time."""
    rows = (re.findall(r"\b(time|host|rank|exitcode)\s*: (\S+(?: \([^)]*\))?)", line) for line in block)
    return {name: text for row in rows for name, text in row}


def task_of(lines: Sequence[str]) -> dict[str, str]:
    """Return host and number of the first task that a scheduler, or the host of the first process that MPI says to have ended."""
    matches = (match for line in lines if (match := pattern_of("places").search(line)))
    return next(({name.rstrip("2"): text for name, text in match.groupdict().items() if text} for match in matches), {})


def place_of(facts: Mapping[str, str]) -> str | None:
    """Return 'rank 11 (local_rank: 3) on node07' by torchrun's block, 'task 3 on node07' by a scheduler's line, or None."""
    process = next((f"{name} {facts[name]}" for name in ("rank", "task") if name in facts), None)
    return " on ".join(filter(None, (process, facts.get("host")))) or None


def of_rank(lines: Sequence[str], block: Sequence[str]) -> list[str]:
    """Return the lines of the rank that the block names, marked [rank3]: by torch or rank-3/8 by Primus."""
    rank = facts_of(block).get("rank", "").partition(" ")[0]
    return [line for line in lines if f"[rank{rank}]" in line or f"rank-{rank}/" in line] if rank else []


def search(section: str, lines: Sequence[str], *, without: str = "") -> Failure | None:
    """Return the failure of the first matching signature of a section of failures.yaml, at its earliest line."""
    for signature in signatures(section):
        for line in lines if signature.name != without else ():
            if match := signature.match(line):
                return failure_of(signature, match, line, lines)
    return None


def failure_of(signature: Signature, match: re.Match[str], line: str, lines: Sequence[str]) -> Failure:
    """Fill the signature's texts with the details of the line."""
    named = "{ranks}" in signature.cause or "{waiting}" in (signature.hint or "")
    ranks = ranks_in(one for one in lines if signature.match(one)) if named else ""
    words = {name: value or "" for name, value in match.groupdict().items()} | {"line": line}
    words |= {"ranks": f", first on {ranks}" if ranks else "", "waiting": f"; waiting: {ranks}" if ranks else ""}
    cause = (memory_cause(lines) if signature.memory == "device" else None) or signature.cause.format_map(words)
    hint = signature.hint.format_map(words) if signature.hint else None
    return Failure(
        outcome=signature.outcome,
        cause=_shortened(cause),
        hint=worker_hint(line, lines) if signature.name == "worker_refused" else hint,
        evidence=_shortened(line),
        kind=signature.kind or signature.name,
        retry=signature.retry,
    )


def ranks_in(lines: Iterable[str]) -> str:
    """Return 'ranks 428, 390', in the order of the lines; empty where they name none."""
    ranks = dict.fromkeys(match[1] for line in lines if (match := RANK.search(RANK_MARK.sub("", line)) or RANK.search(line)))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(islice(ranks, MOST['ranks']))}" if ranks else ""


def worker_hint(line: str, lines: Sequence[str]) -> str | None:
    """Return the `try` row of a worker's own error, whose first line is followed by rows at, why, try (errors.UserError)."""
    rows = takewhile(re.compile("(?:at|why|try) +").match, lines[lines.index(line) + 1 :])
    return next((row.removeprefix("try").strip() for row in rows if row.startswith("try")), None)


def memory_cause(lines: Sequence[str]) -> str | None:
    """Describe the first allocation that failed and the memory that was free."""
    match = next((match for line in lines if (match := pattern_of("allocation").search(line))), None)
    if match is None:
        return None
    of = {name.rstrip("23"): text for name, text in match.groupdict().items() if text}
    device = of.get("device", "TPU" if "used" in of else "GPU").replace("CUDA", "GPU").replace("HIP", "GPU")
    text = f"The {device} ran out of memory: "
    text += f"the program needs {of['used']} of {of['capacity']}" if "used" in of else f"it tried to allocate {of['size']}"
    if "gpu" in of:
        text += f" on {device} {of['gpu']}, where {of['free']} of {of['capacity']} were free"
    return re.sub(r"(\d{4,}) ?bytes", lambda size: gibibytes(int(size[1])), text) + "."


def signal_of(exit_code: int | None, block: Sequence[str], texts: Sequence[str]) -> int | None:
    """Return the signal that ended the first rank, or the process itself; a shell adds 128 to its number."""
    if match := re.match(r"-(\d+)", facts_of(block).get("exitcode", "")):
        return count(match[1])
    ends = [match.groupdict() for text in texts if (match := pattern_of("exits").search(text))]
    said = [signal.SIGKILL if end["killed"] else count(next(filter(None, end.values()))) % 128 for end in ends]
    if said:  # ranks that torchrun or a launcher ends after the first one get SIGTERM
        return next((number for number in said if number != signal.SIGTERM), said[0])
    if exit_code is None or exit_code < 0:
        return None if exit_code is None else -exit_code
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
    cause = ending.cause.format(signal=signal.Signals(number).name)
    return Failure(outcome=ending.outcome, cause=cause, hint=ending.hint, kind=ending.name)


def last_exception(lines: Sequence[str]) -> Failure | None:
    """Return the last exception that matches no signature, ignoring wrappers and echoes of another rank's death."""
    for index in reversed(range(len(lines))):
        line = lines[index]
        if pattern_of("wrappers").search(line) or tells_only(line, "echoes"):
            continue
        above = lines[max(0, index - MOST["traceback"]) : index]
        ends_one = any(TRACEBACK in one for one in above) and pattern_of("other_exceptions").search(line)
        if match := pattern_of("exceptions").search(line) or ends_one:
            text = _shortened(match["text"] + more_of_exception(match["text"], lines, index))
            return Failure(outcome="failed", cause=text, hint="the log has the whole traceback", evidence=_shortened(line))
    return None


def more_of_exception(text: str, lines: Sequence[str], index: int) -> str:
    """Return what the line of an exception leaves out: the next line after a colon, an assert's condition, where a key lacks."""
    if text.endswith(":"):
        following = lines[index + 1] if index + 1 < len(lines) else ""
        return f" {RANK_MARK.sub('', following).strip()}"
    near = lines[max(0, index - MOST["frame"]) : index]
    wanted = [FRAME] if re.match("(?:Key|Index)Error", text) else [] if ":" in text else [ASSERT, FRAME]
    matches = (match for pattern in wanted for line in reversed(near) if (match := pattern.search(line)))
    return next((f": {match[1]}" if match.re is ASSERT else f" ({match[1]}, line {match[2]})" for match in matches), "")


def _last_line(exit_code: int | None, lines: Sequence[str]) -> Failure:
    cause = "The process ended" + ("" if exit_code is None else f" with exit code {exit_code}")
    if not lines:
        return Failure(outcome="failed", cause=f"{cause} and printed nothing.")
    last = _shortened(lines[-1])
    return Failure(outcome="failed", cause=f"{cause}; its last line: {last}", hint="the log may show more", evidence=last)


def _shortened(text: str) -> str:
    most, line = MOST["cause_letters"], " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
