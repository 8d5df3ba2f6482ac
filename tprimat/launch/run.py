"""Run one launch from its first record to its last: start the command, follow its steps, stop it, say how it ended."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from tprimat.core.errors import LaunchError, RecordError, UserError
from tprimat.engines.base import Command
from tprimat.hardware.gpus import Gpu
from tprimat.hardware.sampler import Telemetry
from tprimat.hardware.slurm import TimeLimit
from tprimat.launch.agreement import PART_FAILED, Ended, Group, LostNodeError
from tprimat.launch.collectives import RankRecord, missing_ranks, take_records
from tprimat.launch.process import GRACE_SECONDS, Child, Ending, Interrupts, Output, Supervisor
from tprimat.launch.process_tree import count_oom_kills
from tprimat.launch.stacks import Stack, culprit, describe, take_stacks
from tprimat.launch.torchrun import free_port, with_port
from tprimat.launch.watchdog import Limits, Watchdog
from tprimat.logs.failures import add_log_hint, classify, earliest, ended_early, stopped_by
from tprimat.records.schema import Failure, NodeRecord, RunRecord, StepRecord
from tprimat.records.store import RunDirectory, from_json, opened, to_json, write_atomically

MAX_ERROR_LOG_BYTES = 1 << 20
LEAVE_IT = "leave the output folder in its place until the run has ended"
PIECE_BYTES = 4 << 20
"""Of a growing file, read at once: several times its longest line."""
OTHER_NODES_SECONDS = 12.0
"""For the other nodes to report their end, beyond the grace period of their ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything needed to start one run."""

    command: Command
    directory: RunDirectory
    record: RunRecord
    """The first record, with outcome 'running'. Written before the start; it stays if the worker dies before writing its own."""
    limits: Limits
    grace_seconds: float = GRACE_SECONDS
    logs: tuple[Path, ...] = ()
    """Files that get a copy of the output besides directory.log_file; each is appended to."""
    heading: str = ""
    """Lines to write to the logs before the output of the run."""
    step_of_line: Callable[[str], StepRecord | None] | None = None
    """Reads steps from the log. None: the worker appends to steps.jsonl itself."""
    complete: Callable[[RunRecord], tuple[RunRecord, tuple[StepRecord, ...]]] | None = None
    """With step_of_line: adds the log's evidence and mismatches to the last record, and returns the corrected steps."""
    planned_steps: int | None = None
    """A run that ends with exit status 0 before this step has failed; None: it ends when it has what it looks for."""
    nodes: int = 1
    """On one node a port in use is replaced by a free one; several nodes have agreed on theirs."""
    group: Group | None = None
    """The other nodes, where they take part."""
    error_logs: tuple[str, ...] = ()
    """Glob patterns of the ranks' own logs, such as Primus's 'logs/pre_trainer/rank-*/error.log'."""
    sampled_gpus: tuple[Gpu, ...] = ()
    """GPUs whose power, clock and temperature are sampled, in the order of the local ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """How a launch ended."""

    failure: Failure | None
    """Why the run did not complete; None: it did."""
    exit_code: int | None
    """Of the process; negative signal number if a signal ended it."""
    duration_seconds: float
    steps: tuple[StepRecord, ...] = ()
    """All steps, even if the disk was full; of a long run, merged ones (records/summary.py)."""
    stop_signal: int | None = None
    """A signal asked the launcher to stop: start nothing after this run."""


class Watcher(Protocol):
    """Receives the progress of a run."""

    def on_line(self, text: str) -> None:
        """Take one line of output, without its line end."""

    def on_wait(self, seconds: float) -> None:
        """Called several times a second until the first step, with the time since the start."""

    def on_step(self, step: StepRecord) -> None:
        """Take one finished step."""

    def on_notice(self, text: str) -> None:
        """Take one sentence about the launch itself."""

    def on_end(self, result: LaunchResult) -> None:
        """Take the result; all processes of the run have ended."""


def run(launch: Launch, watcher: Watcher) -> tuple[RunRecord, LaunchResult]:
    """Start a run, follow it to its end, and record how it ended.

    Returns:
        the record as written to run.json, and the result with the steps.

    Raises:
        LaunchError: the command cannot be started here.
        RecordError: the run's folder cannot be written before the start.
    """
    launch.directory.write_run(launch.record)
    launch.directory.reserve_space()
    result = None
    with Interrupts() as interrupts:  # until the last record is written: an impatient second Ctrl-C must not lose it
        try:
            with Telemetry(launch.directory, launch.record.started_at, launch.sampled_gpus, watcher.on_notice):
                result = attempt_twice(launch, watcher, interrupts)
        finally:
            observed = result or launcher_failure(sys.exc_info()[1], interrupts)
            record, result = final_record(launch, observed)
            incomplete = launch.step_of_line is not None and count_lines(launch.directory.steps_file) < len(result.steps)
            corrected = result.steps if incomplete or result.steps != observed.steps else None
            record = write_end(launch.directory, record, corrected, watcher)
    watcher.on_end(result)
    return record, result


def attempt_twice(launch: Launch, watcher: Watcher, interrupts: Interrupts) -> LaunchResult:
    """Start the command, and once more on another port if its port was in use."""
    result = Attempt(launch, watcher, interrupts).run()
    failure = result.failure
    if failure is not None and failure.kind == "port_in_use" and not result.steps and launch.nodes == 1:
        port = free_port()
        watcher.on_notice(f"{failure.cause} Starting once more on port {port}.")
        again = dataclasses.replace(launch, command=with_port(launch.command, port), heading="")
        result = Attempt(again, watcher, interrupts).run()
    return result


def launcher_failure(error: BaseException | None, interrupts: Interrupts) -> LaunchResult:
    """Return the result of a run that could not be started, or whose launcher failed.

    A run that found a node gone never began: nothing is known of it, and where a signal ended all nodes, that is the cause.
    """
    cause = error.what if isinstance(error, UserError) else f"The launcher failed: {error!r}."
    fix = error.fix if isinstance(error, UserError) else None
    lost = isinstance(error, LostNodeError)
    failure = Failure(outcome="interrupted" if lost else "failed", cause=cause, hint=fix)
    if lost and interrupts.first is not None:
        failure = stopped_by(interrupts.first.name, TimeLimit().seconds_left())
    return LaunchResult(failure=failure, exit_code=None, duration_seconds=0.0, stop_signal=interrupts.first)


def final_record(launch: Launch, result: LaunchResult) -> tuple[RunRecord, LaunchResult]:
    """Add the result to the worker's own record, or to the first record if the worker wrote none."""
    try:
        record = launch.directory.read_run()
    except RecordError:  # the worker died while writing it, or the disk is full: the launcher's own facts are still valid
        record = launch.record
    if launch.complete is not None:
        record, steps = launch.complete(record)
        result = dataclasses.replace(result, steps=steps or result.steps)
    return with_end(dataclasses.replace(record, steps_recorded=len(result.steps)), result), result


def with_end(record: RunRecord, result: LaunchResult) -> RunRecord:
    """Return the record of a run that has just ended."""
    ended_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return with_outcome(dataclasses.replace(record, exit_code=result.exit_code, ended_at=ended_at), result.failure)


def with_outcome(record: RunRecord, failure: Failure | None) -> RunRecord:
    """Return a record with a run's outcome and its cause; None: it completed."""
    if failure is None:
        return dataclasses.replace(record, outcome="completed", cause=None, hint=None, cut_off=False)
    cause, hint, cut_off = failure.cause, failure.hint, failure.cut_off
    return dataclasses.replace(record, outcome=failure.outcome, cause=cause, hint=hint, cut_off=cut_off)


def write_end(
    directory: RunDirectory, record: RunRecord, corrected: tuple[StepRecord, ...] | None, watcher: Watcher
) -> RunRecord:
    """Write the steps if they were corrected, and the last record; report a full disk without hiding the result.

    Returns:
        the record, whose outcome is a failure where the steps of a completed run could not be written.
    """
    if corrected is not None:
        try:
            write_atomically(directory.steps_file, "".join(to_json(step) + "\n" for step in corrected))
        except RecordError as error:
            if error.what != record.cause:  # said when it happened
                watcher.on_notice(error.what)
            if record.outcome == "completed":
                record = with_outcome(record, Failure(outcome="failed", cause=error.what, hint=error.fix))
    directory.release_space()
    try:
        directory.write_run(record)
    except RecordError as error:
        watcher.on_notice(error.what)
    return record


def count_lines(path: Path) -> int:
    """Return the number of lines of a file; 0 where it cannot be read."""
    try:
        with opened(path) as file:
            return sum(piece.count(b"\n") for piece in iter(lambda: file.read(PIECE_BYTES), b""))
    except RecordError:
        return 0


class GrowingFile:
    """The whole lines that a file gets, also when it does not exist yet."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset

    def new_lines(self) -> list[bytes]:
        """Return the lines since the last call, piece by piece; none where there are no more. Longer lines are cut."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(PIECE_BYTES)
        except OSError:  # not created yet
            return []
        whole = data if len(data) == PIECE_BYTES and b"\n" not in data else data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()


class WrittenSteps:
    """Follow the steps.jsonl that a worker appends to."""

    def __init__(self, path: Path, on_notice: Callable[[str], None]) -> None:
        self._path = path
        self._on_notice = on_notice
        self._file = GrowingFile(path, path.stat().st_size if path.exists() else 0)

    def on_line(self, text: str) -> None:
        """Ignore the log."""

    def poll(self) -> Iterator[StepRecord]:
        """Yield the steps since the last call: a fast worker may have written many."""
        while lines := self._file.new_lines():
            yield from (step for line in lines if (step := self._parse(line)) is not None)

    @property
    def failure(self) -> Failure | None:
        """None: what the worker cannot write ends it."""
        return None

    def _parse(self, line: bytes) -> StepRecord | None:
        try:
            return from_json(StepRecord, line, where=str(self._path))
        except RecordError as error:
            self._on_notice(f"Skipped a line of {self._path}: {error.why or error.what}")
            return None


class LoggedSteps:
    """Read steps from the log and write steps.jsonl."""

    def __init__(
        self, directory: RunDirectory, step_of_line: Callable[[str], StepRecord | None], on_notice: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._step_of_line = step_of_line
        self._on_notice = on_notice
        self._new: list[StepRecord] = []
        self._unwritten: list[StepRecord] = []
        self._error: RecordError | None = None

    def on_line(self, text: str) -> None:
        """Take a line of the log, which may contain a step."""
        step = self._step_of_line(text)
        if step is not None:
            self._new.append(step)
            self._unwritten.append(step)

    def poll(self) -> list[StepRecord]:
        """Return the steps since the last call and write them; if the disk is full, retry at the next call."""
        try:
            while self._unwritten:
                self._directory.append_step(self._unwritten[0])
                del self._unwritten[0]
        except RecordError as error:
            if self._error is None:
                self._on_notice(error.what)
            self._error = error
        fresh, self._new = self._new, []
        return fresh

    @property
    def failure(self) -> Failure | None:
        """Why some steps are not on disk."""
        if self._error is None or not self._unwritten:
            return None
        return Failure(outcome="failed", cause=self._error.what, hint=self._error.fix)


class Attempt:
    """One start of the command."""

    def __init__(self, launch: Launch, watcher: Watcher, interrupts: Interrupts) -> None:
        self._launch = launch
        self._interrupts = interrupts
        self._watcher = watcher
        self._time_limit = TimeLimit()
        self._oom_kills_before = count_oom_kills()
        self._steps: list[StepRecord] = []
        self._stacks: list[Stack] = []
        self._collectives: list[RankRecord] = []
        self._source: WrittenSteps | LoggedSteps
        if launch.step_of_line is None:
            self._source = WrittenSteps(launch.directory.steps_file, watcher.on_notice)
        else:
            self._source = LoggedSteps(launch.directory, launch.step_of_line, watcher.on_notice)
        self._output = Output((launch.directory.log_file, *launch.logs), self._on_line, watcher.on_notice)
        self._output.write_to_logs(launch.heading)

    def run(self) -> LaunchResult:
        """Start the command and return when its last process has ended, on all nodes."""
        group = self._launch.group
        try:
            if group is not None:
                group.begin(self._launch.record.started_at or "")
            child = Child(self._launch.command, self._launch.grace_seconds)
        except LaunchError as error:
            self._output.close()
            if group is not None and not isinstance(error, LostNodeError):  # which started nothing anywhere
                group.stop(error.what)
                group.finish(self._launch.grace_seconds + OTHER_NODES_SECONDS)
            raise
        supervisor = Supervisor(child, self._output, self._launch.grace_seconds, self._interrupts)
        place = self._launch.directory.path
        folder = identity(place)
        watchdog = Watchdog(self._launch.limits, supervisor.began, self._launch.planned_steps)

        def tick(now: float) -> Failure | None:
            for step in self._source.poll():
                self._steps.append(step)
                watchdog.saw_step(step.step, step.step_seconds, now)
                self._watcher.on_step(step)
            if not self._steps:
                self._watcher.on_wait(now - supervisor.began)
            if identity(place) != folder:
                cause = f"The run's folder {place} was moved or deleted, or cannot be reached."
                return Failure(outcome="failed", cause=cause, hint=LEAVE_IT)
            if group is None:
                return watchdog.verdict(now)
            if self._interrupts.first is not None:
                group.stop(f"Stopped by {self._interrupts.first.name} on the first node.")
            return group.check(now) or watchdog.verdict(now)

        def before_stop(why: Failure, listen: Callable[[], str]) -> Failure:
            self._watcher.on_notice(f"{why.cause} Stopping it.")
            if group is not None:
                group.stop(why.cause, stacks=why.outcome in {"hung", "timed_out"})
            if identity(place) != folder:
                return why
            self._collectives = take_records(child.members(), place)
            self._stacks = take_stacks(child.members(), listen)
            return self._with_stacks(why)

        ending = supervisor.run(tick, before_stop)
        return self._result(ending, None if group is None else self._end_elsewhere(group, ending))

    def _end_elsewhere(self, group: Group, ending: Ending) -> Failure | None:
        """Wait for the other nodes; return why the run failed there, None where it did not or was stopped from here."""
        if ending.exit_code != 0:
            group.stop("The ranks of the first node have ended.")
        return group.finish(self._launch.grace_seconds + OTHER_NODES_SECONDS)

    def _ends_elsewhere(self) -> list[tuple[NodeRecord, str, Ended]]:
        return [] if self._launch.group is None else self._launch.group.ends()

    def _with_stacks(self, why: Failure) -> Failure:
        """Save the stacks of the processes, and return the failure with a hint to them."""
        text, path = describe(self._stacks), self._launch.directory.path / "stacks.txt"
        if not text:
            self._watcher.on_notice("No stacks are saved: py-spy is not installed, and no process prints its own.")
            return why if why.hint else dataclasses.replace(why, hint="pip install py-spy: it shows where each rank waits")
        try:
            path.write_text(text, encoding="utf8")
        except OSError as error:
            self._watcher.on_notice(f"The stacks cannot be written to {path}: {error.strerror or error}.")
            return why
        self._watcher.on_notice(f"The stacks of {len(self._stacks)} processes are in {path}.")
        return why if why.hint else dataclasses.replace(why, hint="stacks.txt in the run's folder shows where each rank waits")

    def _with_culprit(self, why: Failure) -> Failure:
        """Return the failure of a run that was stopped, with the rank that kept the others waiting, on whichever node."""
        stacks, collectives = self._stacks, self._collectives
        for node, _, ended in self._ends_elsewhere():
            stacks = stacks + [dataclasses.replace(each, node=node.host) for each in ended.stacks]
            collectives = [*collectives, *ended.collectives]
        found = [culprit(stacks)]
        if why.outcome == "hung" or not self._steps:  # a run that only takes too long has collectives on their way
            found.append(missing_ranks(collectives))
        return dataclasses.replace(why, cause=" ".join((why.cause, *filter(None, found))))

    def _on_line(self, text: str) -> None:
        self._source.on_line(text)
        self._watcher.on_line(text)

    def _result(self, ending: Ending, elsewhere: Failure | None) -> LaunchResult:
        failure = self._failure(ending, [*self._output.tail, *error_log_lines(self._launch.error_logs)], elsewhere)
        if ending.survivors:
            self._watcher.on_notice(f"Even SIGKILL cannot end the processes {sorted(ending.survivors)}; please check them.")
        return LaunchResult(
            failure=failure,
            exit_code=ending.exit_code,
            duration_seconds=ending.duration_seconds,
            steps=tuple(self._steps),
            stop_signal=self._interrupts.first,
        )

    def _failure(self, ending: Ending, lines: list[str], elsewhere: Failure | None) -> Failure | None:
        stopped, number = ending.stopped, self._interrupts.first
        # The ranks may have died of the signal before the launcher stopped them.
        if number is not None and ending.exit_code != 0 and (stopped is None or stopped.outcome == "interrupted"):
            return stopped_by(number.name, self._time_limit.seconds_left())
        if elsewhere is not None and elsewhere.kind != PART_FAILED:
            return elsewhere  # a node is lost or was stopped: the ranks here only followed
        if stopped is None or stopped.kind == PART_FAILED:
            return self._cause_in_the_logs(ending, lines)
        return add_log_hint(self._with_culprit(stopped), lines) if stopped.outcome in {"hung", "timed_out"} else stopped

    def _cause_in_the_logs(self, ending: Ending, lines: list[str]) -> Failure | None:
        """Return why the ranks failed, on whichever node they failed first; None: they did not."""
        killed = (count_oom_kills() or 0) > (self._oom_kills_before or 0)
        planned, steps = self._launch.planned_steps, tuple(self._steps)
        found = classify(ending.exit_code, lines, steps, oom_killed=killed)
        failures = [] if found is None else [(found, lines)]
        for _, name, ended in self._ends_elsewhere():
            there = classify(ended.exit_code, ended.lines, steps) if ended.failed else None
            if there is not None:
                failures.append((dataclasses.replace(there, cause=f"{name}: {there.cause}"), list(ended.lines)))
        if failures:
            return earliest(failures)
        found = None if planned is None else ended_early(steps, planned)
        return found or self._source.failure


def identity(folder: Path) -> tuple[int, int] | None:
    """Return what stays the same while a folder keeps its place; None where nothing can be reached there."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def error_log_lines(patterns: Iterable[str]) -> list[str]:
    """Read the last MAX_ERROR_LOG_BYTES of the ranks' own logs, rank by rank."""
    lines = []
    for pattern in patterns:
        base = Path(pattern)
        for path in sorted(Path(base.anchor or ".").glob(str(base.relative_to(base.anchor)))):
            try:
                data = path.read_bytes()[-MAX_ERROR_LOG_BYTES:]
            except OSError:  # a folder, or not readable
                continue
            lines += data.decode("utf8", errors="replace").splitlines()
    return lines
