"""Run one launch from its first record to its last: start the command, follow its steps, stop it, say how it ended."""

import contextlib
import dataclasses
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from tprimat.core.errors import RecordError, UserError
from tprimat.engines.base import Command
from tprimat.hardware.gpus import Gpu, telemetry
from tprimat.hardware.nodes import job_ends_at
from tprimat.launch.agreement import PART_FAILED, LostNodeError, NodeGroup
from tprimat.launch.hang import culprit, missing_ranks
from tprimat.launch.process import GRACE_SECONDS, Ending, Interrupts, Output, Supervisor
from tprimat.launch.process_tree import count_oom_kills
from tprimat.logs.failures import add_log_hint, classify, earliest, ended_early, stopped_by
from tprimat.plan.schema import BenchmarkingConfig
from tprimat.records.schema import Failure, Outcome, RunRecord, StepRecord
from tprimat.records.store import RunDirectory, from_json, to_json, write_atomically

MAX_ERROR_LOG_BYTES = 1 << 20
PIECE_BYTES = 4 << 20
"""Of a growing file, read at once: several times its longest line."""
OTHER_NODES_SECONDS = 12.0
"""For the other nodes to report their end, beyond the grace period of their ranks."""
HINT = "stacks.txt in the run's folder shows where each rank waits"
USUAL_STEPS = 1000
"""The newest steps, whose median time is the usual one."""


class Watchdog:
    """Decide whether a run is still alive. All times are seconds on the launcher's monotonic clock."""

    def __init__(self, limits: BenchmarkingConfig, started: float, planned_steps: int | None = None) -> None:
        self.limits = limits
        self.started = started
        self.planned_steps = planned_steps
        self._last_step: int | None = None
        self._last_progress = started
        self._step_seconds: deque[float] = deque(maxlen=USUAL_STEPS)
        self._gaps: deque[float] = deque(maxlen=USUAL_STEPS)

    def saw_step(self, step: int, step_seconds: float, now: float) -> None:
        """Record that a step has ended."""
        if self._last_step is not None:
            self._gaps.append(now - self._last_progress)
        self._last_step, self._last_progress = step, now
        self._step_seconds.append(step_seconds)

    @property
    def hang_seconds(self) -> float:
        """Longest time without a finished step, by step times or the gaps between reports: every tenth step may be reported."""
        usual = max(statistics.median(self._step_seconds), statistics.median(self._gaps or [0.0]))
        return max(self.limits.hang_factor * usual, self.limits.hang_minimum_seconds)

    def verdict(self, now: float) -> Failure | None:
        """Return why the run must be stopped, or None. Called several times a second."""
        limits = self.limits
        if limits.run_timeout_seconds is not None and now - self.started > limits.run_timeout_seconds:
            return Failure(
                outcome="timed_out",
                cause=f"The run took longer than run_timeout_seconds ({limits.run_timeout_seconds:g} s); {self._progress()}.",
                hint="raise benchmarking.run_timeout_seconds, or ask for fewer steps",
            )
        if self._last_step is None:
            if now - self._last_progress <= limits.startup_timeout_seconds:
                return None
            return Failure(
                outcome="timed_out",
                cause=f"No step finished within startup_timeout_seconds ({limits.startup_timeout_seconds:g} s) of the start.",
                hint="the log shows how far it got; raise benchmarking.startup_timeout_seconds if it only compiles or downloads",
            )
        if now - self._last_progress <= self.hang_seconds:
            return None
        median = statistics.median(self._step_seconds)
        return Failure(
            outcome="hung",
            cause=f"No step for {now - self._last_progress:.0f} s, while a step takes {median:.3g} s; {self._progress()}.",
        )

    def _progress(self) -> str:
        if self._last_step is None:
            return "no step finished"
        if self._last_step == self.planned_steps:
            return f"all {self._last_step} steps finished, but the processes did not end"
        return f"the last was step {self._last_step}" + (f" of {self.planned_steps}" if self.planned_steps else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything needed to start one run."""

    command: Command
    directory: RunDirectory
    record: RunRecord
    """The first record, with outcome 'running'. Written before the start; it stays if the worker dies before writing its own."""
    limits: BenchmarkingConfig
    """How long it may take to start, to make a step, and in total."""
    grace_seconds: float = GRACE_SECONDS
    logs: tuple[Path, ...] = ()
    """Files that get a copy of the output besides directory.log_file; each is appended to."""
    heading: str = ""
    step_of_line: Callable[[str], StepRecord | None] | None = None
    """Reads steps from the log. None: the worker appends to steps.jsonl itself."""
    complete: Callable[[RunRecord], tuple[RunRecord, tuple[StepRecord, ...]]] | None = None
    """With step_of_line: adds the log's evidence and mismatches to the last record, and returns the corrected steps."""
    planned_steps: int | None = None
    """A run that ends well before this step has failed; None: it ends when it has what it looks for."""
    group: NodeGroup | None = None
    error_logs: tuple[str, ...] = ()
    """Glob patterns of the ranks' own logs, such as Primus's 'logs/pre_trainer/rank-*/error.log'."""
    sampled_gpus: tuple[Gpu, ...] = ()
    """GPUs whose power, clock and temperature are sampled, in the order of the local ranks."""


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


def run(launch: Launch, watcher: Watcher) -> tuple[RunRecord, tuple[StepRecord, ...]]:
    """Start a run, follow it to its end, and return the record in run.json with all steps, even if the disk was full."""
    launch.directory.write_run(launch.record)
    launch.directory.reserve_space()
    with Interrupts() as interrupts:  # until the last record is written: an impatient second Ctrl-C must not lose it
        attempt = Attempt(launch, watcher, interrupts)
        try:
            with telemetry(launch.directory, launch.record.started_at, launch.sampled_gpus, watcher.on_notice):
                attempt.run()
        except UserError as error:  # a launcher that found a node gone began nothing
            outcome: Outcome = "interrupted" if isinstance(error, LostNodeError) else "failed"
            attempt.failure = Failure(outcome=outcome, cause=error.what, hint=error.fix)
            raise
        finally:
            mistake = sys.exc_info()[1]
            if mistake is not None and not isinstance(mistake, UserError):
                attempt.failure = Failure(outcome="failed", cause=f"The launcher failed: {mistake!r}.")
            ended = attempt.write_end()
    return ended


def with_outcome(record: RunRecord, failure: Failure | None) -> RunRecord:
    """Return a record with a run's outcome and its cause; None: it completed."""
    if failure is None:
        return dataclasses.replace(record, outcome="completed", cause=None, hint=None, cut_off=False)
    cause, hint, cut_off = failure.cause, failure.hint, failure.cut_off
    return dataclasses.replace(record, outcome=failure.outcome, cause=cause, hint=hint, cut_off=cut_off)


class Steps:
    """The steps of a run: those that the worker appends to steps.jsonl, or those that lines of the log report."""

    def __init__(self, launch: Launch, on_notice: Callable[[str], None]) -> None:
        self._directory = launch.directory
        self._step_of_line = launch.step_of_line
        self._on_notice = on_notice
        path = launch.directory.steps_file
        self._offset = path.stat().st_size if path.exists() else 0
        self._logged: list[StepRecord] = []
        self._full = False

    def on_line(self, text: str) -> None:
        """Take a line of the log."""
        if self._step_of_line is None or (step := self._step_of_line(text)) is None:
            return
        self._logged.append(step)
        try:
            if not self._full:
                self._directory.append_step(step)
        except RecordError as error:  # the end of the run writes all of them
            self._full = True
            self._on_notice(error.what)

    def new(self) -> Iterator[StepRecord]:
        """Yield the steps since the last call: a fast worker may have written many."""
        if self._step_of_line is not None:
            fresh, self._logged = self._logged, []
            yield from fresh
            return
        path = self._directory.steps_file
        while path.exists():
            with path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(PIECE_BYTES)
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                try:
                    yield from_json(StepRecord, line, where=str(path))
                except RecordError as error:
                    self._on_notice(f"Skipped a line of {path}: {error.why or error.what}")
            if not whole:
                return


class Attempt:
    """One start of the command."""

    def __init__(self, launch: Launch, watcher: Watcher, interrupts: Interrupts) -> None:
        self._launch = launch
        self._interrupts = interrupts
        self._watcher = watcher
        self.failure: Failure | None = None
        self._exit_code: int | None = None
        self._job_ends_at = job_ends_at()
        self._oom_kills_before = count_oom_kills()
        self._steps: list[StepRecord] = []
        self._source = Steps(launch, watcher.on_notice)
        self._output = Output((launch.directory.log_file, *launch.logs), self._on_line, watcher.on_notice)
        self._output.write_to_logs("".join(f"{line}\n" for line in launch.heading.splitlines()).encode())

    def run(self) -> None:
        """Start the command and return when its last process has ended, on all nodes."""
        launch, group = self._launch, self._launch.group
        patience = launch.grace_seconds + OTHER_NODES_SECONDS
        try:
            if group is not None:
                group.begin()
            supervisor = Supervisor(
                launch.command, self._output, self._interrupts, folder=launch.directory.path, grace_seconds=launch.grace_seconds
            )
        except UserError as error:
            self._output.close()
            if group is not None and not isinstance(error, LostNodeError):  # which started nothing anywhere
                group.stop(error.what)
                group.finish(patience)
            raise
        watchdog = Watchdog(launch.limits, supervisor.began, launch.planned_steps)

        def tick(now: float) -> Failure | None:
            for step in self._source.new():
                self._steps.append(step)
                watchdog.saw_step(step.step, step.step_seconds, now)
                self._watcher.on_step(step)
            if not self._steps:
                self._watcher.on_wait(now - supervisor.began)
            if group is not None and self._interrupts.first is not None:
                group.stop(f"Stopped by {self._interrupts.first.name} on the first node.")
            verdict = (group and group.check()) or watchdog.verdict(now)
            if group is not None and verdict is not None:
                group.stop(verdict.cause)
            return verdict

        ending = supervisor.run(tick)
        if group is not None and ending.exit_code != 0:
            group.stop("The ranks of the first node have ended.")
        gone = None if group is None else group.finish(patience)
        self.failure, self._exit_code = self._cause(ending, gone), ending.exit_code
        if ending.exit_code is None:
            self._watcher.on_notice("Even SIGKILL cannot end some processes of the run; please check them.")

    def write_end(self) -> tuple[RunRecord, tuple[StepRecord, ...]]:
        """Write the last record, from the worker's own or from the first one; report a full disk without hiding the result."""
        launch, directory, steps = self._launch, self._launch.directory, tuple(self._steps)
        try:
            record = directory.read_run()
        except RecordError:  # the worker died while writing it, or the disk is full: the launcher's own facts are still valid
            record = launch.record
        if launch.complete is not None:
            record, corrected = launch.complete(record)
            steps = corrected or steps
        ended_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        record = dataclasses.replace(record, exit_code=self._exit_code, ended_at=ended_at, steps_recorded=len(steps))
        record = with_outcome(record, self.failure)
        try:
            if launch.step_of_line is not None:  # the whole log may correct what its lines said
                write_atomically(directory.steps_file, "".join(to_json(step) + "\n" for step in steps))
        except RecordError as error:
            if record.outcome == "completed":
                record = with_outcome(record, Failure(outcome="failed", cause=error.what, hint=error.fix))
        directory.release_space()
        try:
            directory.write_run(record)
        except RecordError as error:
            self._watcher.on_notice(error.what)
            record = with_outcome(launch.record, Failure(outcome="failed", cause=error.what, hint=error.fix))
            with contextlib.suppress(RecordError):  # as short as the first one, which a limit of file sizes (ulimit -f) let pass
                directory.write_run(record)
        return record, steps

    def _on_line(self, text: str) -> None:
        self._source.on_line(text)
        self._watcher.on_line(text)

    def _cause(self, ending: Ending, gone: Failure | None) -> Failure | None:
        """Return why the run did not complete; None: it did. `gone` is another node that was lost, or did not end."""
        elsewhere = {} if self._launch.group is None else self._launch.group.ends()
        first, stopped = self._interrupts.first, ending.stopped
        # The ranks may have died of the signal before the launcher stopped them, and another node may have had it first.
        stops = (stopped, *(ended.stopped for ended in elsewhere.values()))
        signalled = stopped is None or any(stop is not None and stop.outcome == "interrupted" for stop in stops)
        if first is not None and ending.exit_code != 0 and signalled:
            job_end = job_ends_at(self._job_ends_at)
            return stopped_by(first.name, None if job_end is None else job_end - time.time())
        for name, ended in elsewhere.items():
            if ended.stopped is not None:
                return dataclasses.replace(ended.stopped, cause=f"{name}: {ended.stopped.cause}")
        if gone is not None:
            return gone
        lines = [*self._output.tail, *error_log_lines(self._launch.error_logs)]
        if stopped is not None and stopped.outcome in {"hung", "timed_out"}:
            return add_log_hint(self._where_it_stood(stopped, [ending, *elsewhere.values()]), lines)
        if stopped is not None and stopped.kind != PART_FAILED:
            return stopped
        killed = count_oom_kills() > self._oom_kills_before
        failures = [(classify(ending.exit_code, lines, self._steps, oom_killed=killed), lines)]
        for name, ended in elsewhere.items():
            there = classify(ended.exit_code, ended.lines, self._steps) if ended.exit_code else None
            failures.append((there and dataclasses.replace(there, cause=f"{name}: {there.cause}"), list(ended.lines)))
        if named := [(failure, its_lines) for failure, its_lines in failures if failure is not None]:
            return earliest(named)
        planned = self._launch.planned_steps
        return None if planned is None else ended_early(self._steps, planned)

    def _where_it_stood(self, stopped: Failure, ends: Sequence[Ending]) -> Failure:
        """Return why a run was stopped, with the rank that the others wait for, by the stacks and collectives of all nodes."""
        words = [stopped.cause, culprit([stack for end in ends for stack in end.stacks])]
        if stopped.outcome == "hung" or not self._steps:  # a run that only takes too long has collectives on their way
            words.append(missing_ranks([record for end in ends for record in end.collectives]))
        hint = stopped.hint or (HINT if any(stack.text for stack in ends[0].stacks) else None)
        return dataclasses.replace(stopped, cause=" ".join(filter(None, words)), hint=hint)


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
