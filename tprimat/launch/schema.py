"""What a launch is asked for, what it tells while it runs, and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tprimat.engines.base import Command
from tprimat.hardware.gpus import Gpu
from tprimat.records.schema import Outcome, RunRecord, StepRecord
from tprimat.records.store import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a run may take to start, to make a step, and in all."""

    startup_timeout_seconds: float
    """Until the first step has ended."""
    hang_factor: float
    hang_minimum_seconds: float
    run_timeout_seconds: float | None = None
    run_timeout_flag: str | None = None
    """Where the time in all comes from, for messages; None: the configuration's own key."""
    grace_seconds: float = 6.0
    """Between SIGTERM and SIGKILL. A stop takes at most this and a second, which keeps the promise of 10 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything that starting one run takes."""

    command: Command
    directory: RunDirectory
    record: RunRecord
    """The first record, outcome 'running'. Written before the start; it stands if the worker dies before it writes its own."""
    limits: Limits
    logs: tuple[Path, ...] = ()
    """Where the output goes besides directory.log_file; each is appended to."""
    heading: str = ""
    """Lines for the logs before the run's own. Written here, so that a log that cannot be written stops nothing."""
    step_of_line: Callable[[str], StepRecord | None] | None = None
    """For engines whose steps are read from the log. None: the worker appends steps.jsonl itself."""
    complete: Callable[[RunRecord], tuple[RunRecord, tuple[StepRecord, ...]]] | None = None
    """For the same engines: adds what the log proves (evidence, mismatches) to the last record, and mends the steps."""
    planned_steps: int | None = None
    nodes: int = 1
    """On one node a port that is in use is replaced by a free one; several nodes have agreed on theirs."""
    error_logs: tuple[str, ...] = ()
    """Glob patterns of further logs of the ranks, such as Primus's 'logs/pre_trainer/rank-*/error.log'."""
    alternatives: tuple[str, ...] = ()
    """Strategies that need less memory than this one, the nearest first."""
    sampled_gpus: tuple[Gpu, ...] = ()
    """Whose power, clock and temperature are read while the run goes on, in the order of the local ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """How a launch ended."""

    outcome: Outcome
    exit_code: int | None
    """Of the process; minus the signal's number where a signal ended it."""
    cause: str | None
    hint: str | None
    duration_seconds: float
    evidence: str | None = None
    """The line of the log that the cause was read from."""
    steps: tuple[StepRecord, ...] = ()
    """As they came by, complete even where the disk was full."""
    stop_requested: bool = False
    """The launcher itself was asked to end: nothing should start after this run."""
    port_in_use: bool = False
    """Another start on another port may work."""


class Watcher(Protocol):
    """Whoever shows a run while it goes on."""

    def on_line(self, text: str) -> None:
        """One line of output, without its end."""
        ...

    def on_step(self, step: StepRecord) -> None:
        """One finished step."""
        ...

    def on_notice(self, text: str) -> None:
        """Something about the launch itself, in one sentence."""
        ...

    def on_end(self, result: LaunchResult) -> None:
        """The run and all its processes are gone."""
        ...
