"""Where the steps of a run come from: the worker's steps.jsonl, or the lines of its log."""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from tprimat.errors import LaunchError, RecordError, UserError
from tprimat.hardware.sampler import Telemetry
from tprimat.launch.process import Child, Ending, Interrupts, Output, Supervision
from tprimat.launch.schema import Launch, LaunchResult, Watcher
from tprimat.launch.torchrun import free_port, on_another_port
from tprimat.launch.watchdog import Watchdog, dump_stacks
from tprimat.logs.failures import Failure, add_log_hint, classify, out_of_memory_kills
from tprimat.records.files import from_json, to_json, write_atomically
from tprimat.records.schema import RunRecord, StepRecord
from tprimat.records.store import RunDirectory


class StepSource(Protocol):
    """Gives each step once, in the order of its end."""

    def on_line(self, text: str) -> None:
        """A line of the log went by."""
        ...

    def poll(self) -> list[StepRecord]:
        """The steps since the last call."""
        ...


class WrittenSteps:
    """Follows a steps.jsonl that a worker appends to. A line that is not whole yet is left for the next call."""

    def __init__(self, path: Path, on_notice: Callable[[str], None]) -> None:
        self._path = path
        self._on_notice = on_notice
        self._offset = path.stat().st_size if path.exists() else 0

    def on_line(self, text: str) -> None:
        """Nothing: the log is for people here."""

    def poll(self) -> list[StepRecord]:
        """The steps since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:  # not there yet
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [step for line in whole.splitlines() if (step := self._read(line)) is not None]

    def _read(self, line: bytes) -> StepRecord | None:
        try:
            return from_json(StepRecord, line, where=str(self._path))
        except RecordError as error:
            self._on_notice(f"a line of {self._path} is passed over: {error.why or error.what}")
            return None


class LoggedSteps:
    """Makes steps.jsonl from the log."""

    def __init__(
        self, directory: RunDirectory, step_of_line: Callable[[str], StepRecord | None], on_notice: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._step_of_line = step_of_line
        self._on_notice = on_notice
        self._new: list[StepRecord] = []
        self._unwritten: list[StepRecord] = []
        self._complained = False

    def on_line(self, text: str) -> None:
        """A line of the log, which may say something about a step."""
        step = self._step_of_line(text)
        if step is not None:
            self._new.append(step)
            self._unwritten.append(step)

    def poll(self) -> list[StepRecord]:
        """The steps since the last call, which also stand in steps.jsonl unless the disk is full; then it is tried again."""
        try:
            while self._unwritten:
                self._directory.append_step(self._unwritten[0])
                del self._unwritten[0]
        except RecordError as error:
            if not self._complained:
                self._complained = True
                self._on_notice(error.what)
        fresh, self._new = self._new, []
        return fresh


# One run from its first record to its last.

MOST_ERROR_LOG_BYTES = 1 << 20


def run(launch: Launch, watcher: Watcher) -> tuple[RunRecord, LaunchResult]:
    """Start a run, follow it, stop it when it must be stopped, and write down how it ended.

    Args:
        launch: what to start.
        watcher: told of every line and step while the run goes on.

    Returns:
        the record as it stands in run.json, and the result with the steps.

    Raises:
        LaunchError: the command cannot be started here.
        RecordError: the run's folder cannot be written before the start.
    """
    launch.directory.write_run(launch.record)
    result = None
    with Interrupts() as interrupts:  # until the last record stands: an impatient second Ctrl-C must not lose it
        try:
            with Telemetry(launch.directory, launch.record.started_at, launch.sampled_gpus, watcher.on_notice):
                result = attempts(launch, watcher, interrupts)
        finally:
            seen = result or broken_off(sys.exc_info()[1])
            record, result = finished(launch, seen)
            keep(launch.directory, record, result.steps if result.steps != seen.steps else None, watcher)
    watcher.on_end(result)
    return record, result


def try_out(launch: Launch, watcher: Watcher) -> LaunchResult:
    """Start something that leaves no record of its own, such as a search for what fits, and follow it to its end.

    Raises:
        LaunchError: the command cannot be started here.
    """
    with Interrupts() as interrupts:
        return attempts(launch, watcher, interrupts)


def keep(directory: RunDirectory, record: RunRecord, mended: tuple[StepRecord, ...] | None, watcher: Watcher) -> None:
    """Write the end of a run, and its steps where they were mended; a full disk is said and does not hide the result."""
    try:
        directory.write_run(record)
        if mended is not None:
            write_atomically(directory.steps_file, "".join(to_json(step) + "\n" for step in mended))
    except RecordError as error:
        watcher.on_notice(error.what)


def attempts(launch: Launch, watcher: Watcher, interrupts: Interrupts) -> LaunchResult:
    """One start, and a second one where only the port was in the way."""
    result = Attempt(launch, watcher, interrupts).go()
    if result.port_in_use and not result.steps and launch.nodes == 1:
        port = free_port()
        watcher.on_notice(f"{result.cause} Starting once more on port {port}.")
        again = dataclasses.replace(launch, command=on_another_port(launch.command, port), heading="")
        result = Attempt(again, watcher, interrupts).go()
    return result


def broken_off(error: BaseException | None) -> LaunchResult:
    """The end of a run that the launcher itself did not survive, or could not start."""
    cause = error.what if isinstance(error, UserError) else f"The launcher broke off: {error!r}."
    fix = error.fix if isinstance(error, UserError) else None
    return LaunchResult(outcome="failed", exit_code=None, cause=cause, hint=fix, duration_seconds=0.0)


def finished(launch: Launch, result: LaunchResult) -> tuple[RunRecord, LaunchResult]:
    """The worker's own record, or the first one if it wrote none, with the end of the run in it."""
    try:
        record = launch.directory.read_run()
    except RecordError:  # the worker died while writing, or the disk is full: what we know ourselves is still true
        record = launch.record
    if launch.complete is not None:
        record, steps = launch.complete(record)
        result = dataclasses.replace(result, steps=steps or result.steps)
    ended = dataclasses.replace(
        record,
        outcome=result.outcome,
        exit_code=result.exit_code,
        cause=result.cause,
        hint=result.hint,
        ended_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
    )
    return ended, result


class Attempt:
    """One start of the command."""

    def __init__(self, launch: Launch, watcher: Watcher, interrupts: Interrupts) -> None:
        self._launch = launch
        self._interrupts = interrupts
        self._watcher = watcher
        self._kills_before = out_of_memory_kills()
        self._seen: list[StepRecord] = []
        self._source: StepSource
        if launch.step_of_line is None:
            self._source = WrittenSteps(launch.directory.steps_file, watcher.on_notice)
        else:
            self._source = LoggedSteps(launch.directory, launch.step_of_line, watcher.on_notice)
        self._output = Output((launch.directory.log_file, *launch.logs), self._on_line, watcher.on_notice)
        self._output.note(launch.heading)

    def go(self) -> LaunchResult:
        """Until its last process is gone."""
        try:
            child = Child(self._launch.command, self._launch.limits.grace_seconds)
        except LaunchError:
            self._output.close()
            raise
        supervision = Supervision(child, self._output, self._launch.limits, self._interrupts)
        watchdog = Watchdog(self._launch.limits, supervision.began, self._launch.planned_steps)

        def tick(now: float) -> Failure | None:
            for step in self._source.poll():
                self._seen.append(step)
                watchdog.saw_step(step.step, step.step_seconds, now)
                self._watcher.on_step(step)
            return watchdog.verdict(now)

        def before_stop(why: Failure) -> None:
            if why.outcome in {"hung", "timed_out"}:
                self._watcher.on_notice(f"{why.cause} Stopping it.")
                dump_stacks(child.members(), self._launch.directory.path / "stacks.txt", self._watcher.on_notice)

        ending = supervision.run(tick, before_stop)
        return self._result(ending)

    def _on_line(self, text: str) -> None:
        self._source.on_line(text)
        self._watcher.on_line(text)

    def _result(self, ending: Ending) -> LaunchResult:
        failure = self._failure(ending, [*self._output.tail, *error_log_lines(self._launch.error_logs)])
        if ending.given_up:
            self._watcher.on_notice(f"processes {sorted(ending.given_up)} cannot be ended, not even by SIGKILL; look at them.")
        return LaunchResult(
            outcome=failure.outcome if failure else "completed",
            exit_code=ending.exit_code,
            cause=failure.cause if failure else None,
            hint=failure.hint if failure else None,
            duration_seconds=ending.duration_seconds,
            steps=tuple(self._seen),
            evidence=failure.evidence if failure else None,
            stop_requested=self._interrupts.count > 0,
            port_in_use=failure is not None and failure.kind == "port_in_use",
        )

    def _failure(self, ending: Ending, lines: list[str]) -> Failure | None:
        if ending.stopped is None:
            killed = (out_of_memory_kills() or 0) > (self._kills_before or 0)
            return classify(ending.exit_code, lines, self._seen, alternatives=self._launch.alternatives, killed_for_memory=killed)
        return add_log_hint(ending.stopped, lines) if ending.stopped.outcome in {"hung", "timed_out"} else ending.stopped


def error_log_lines(patterns: Iterable[str]) -> list[str]:
    """The ends of further logs, rank by rank."""
    lines = []
    for pattern in patterns:
        base = Path(pattern)
        for path in sorted(Path(base.anchor or ".").glob(str(base.relative_to(base.anchor)))):
            try:
                data = path.read_bytes()[-MOST_ERROR_LOG_BYTES:]
            except OSError:  # a folder, or not ours
                continue
            lines += data.decode("utf8", errors="replace").splitlines()
    return lines
