"""Run cells in order: reuse earlier runs, cool down in between, and continue when one fails.

The records are the only state: a stopped sweep continues from what is on disk.
"""

import contextlib
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tprimat.core import units
from tprimat.core.errors import LaunchError, RecordError, UserError
from tprimat.engines.base import engine_named, require_worker_modules
from tprimat.hardware.gpus import users_of
from tprimat.hardware.nodes import gpus_of_ranks
from tprimat.hardware.slurm import job_name
from tprimat.launch.agreement import Group, LostNodeError
from tprimat.launch.process import Interrupts
from tprimat.launch.run import with_outcome
from tprimat.plan.schema import RunPlan, read_plan
from tprimat.records.environment import changed_variable, masked_environment, variables_of_run
from tprimat.records.lock import locked
from tprimat.records.schema import Failure, Machine, RunRecord
from tprimat.records.store import RunDirectory
from tprimat.report.screen import screen_of
from tprimat.runner.nodes import follow, gathered
from tprimat.runner.progress import outcome_line
from tprimat.runner.run import TrainingRun, announcement, load_run, log_path, run_plan
from tprimat.runner.session import Session

FREE_WITHIN_SECONDS = 30.0
"""For an earlier run's processes to give their memory back."""
COOLDOWN_SECONDS_ON_A_GPU = 20.0
"""Between runs, for drivers to release memory and for clocks and temperature to settle."""
RESULTS = {"failed", "out_of_memory", "diverged", "timed_out", "hung"}
"""Outcomes that say something about a cell. Interrupted runs, and those without an end, do not."""
SAME_SOFTWARE = ("torch", "megatron-core", "nemo-toolkit", "transformer-engine", "triton", "torchao", "torchtitan", "primus")
"""Packages whose versions make two runs different measurements."""
RUN_FIELDS = {"run_id", "run_directory", "output_directory", "engine_reason", "trainer", "command", "prediction"}
"""Fields of a plan that differ between two runs of the same configuration, and what older plans lack."""

ABANDONED = Failure(
    outcome="interrupted",
    cause="The launcher ended before it could record how: it was killed, or the disk was full.",
    hint="--resume repeats the run",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run to make."""

    session: Session
    plan: RunPlan
    label: str = ""
    """What a sweep varies in it, such as tp=2 micro_batch_size=4."""
    is_needless: "Callable[[Sequence[CellResult]], bool]" = lambda results: False
    """Asked right before the run, with the results of all cells before it: whether they make the run unnecessary."""

    @property
    def name(self) -> str:
        """Model and strategy, and what a sweep varies."""
        return f"{self.plan.model} {self.plan.strategy}" + (f" ({self.label})" if self.label else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What became of a cell."""

    cell: Cell
    run: TrainingRun | None = None
    """None: nothing could be started."""
    reused: bool = False
    """`run` is an earlier run of the same plan."""
    cause: str | None = None
    """Why nothing could be started, or why the run failed."""
    stop_signal: int | None = None
    """A signal that asked for an end, during the run or the wait after it."""
    needless: bool = False
    """Earlier results made the run unnecessary."""
    is_last: bool = False
    """What kept it from starting would keep the others too."""

    @property
    def counts(self) -> bool:
        """Whether there is a run that an analysis may count."""
        return self.run is not None and self.run.record.counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """How cells become runs."""

    start: Callable[[Cell], TrainingRun]
    """Make the run of a cell."""
    load: Callable[[Cell, RunRecord], TrainingRun]
    """Read an earlier run of a cell."""
    notify: Callable[[str], None]
    differs: Callable[[Cell, RunRecord], str | None] = lambda cell, record: None
    """Why an earlier run of the same plan says nothing about this machine; None: it does."""
    cooldown_seconds: float = 0.0
    resume: bool = True
    retry_failed: bool = True
    """Make cells again whose newest run failed; False: a failure is a result too."""

    def run(self, cells: Sequence[Cell]) -> list[CellResult]:
        """Run all cells in order. A failure stops no other cell; a lost node or the user's stop leaves the rest without a result.

        With `resume`, an earlier run of a plan that counts is reused, the newest first; without one the plan runs. Where a plan
        occurs more than once (repetitions), each cell gets its own run.
        """
        earlier = earlier_runs(cells) if self.resume else []
        with Interrupts() as interrupts:  # so that a signal breaks off no writing between two runs
            results = self._run(cells, earlier, interrupts)
        if results and interrupts.first is not None:
            results[-1] = dataclasses.replace(results[-1], stop_signal=interrupts.first)
        return results

    def _run(self, cells: Sequence[Cell], earlier: list[tuple[RunPlan, RunRecord]], interrupts: Interrupts) -> list[CellResult]:
        results: list[CellResult] = []
        seconds: list[float] = []
        history = tuple(earlier)
        for place, cell in enumerate(cells):
            if results and interrupts.first is not None:
                break
            if cell.is_needless(results):
                results.append(CellResult(cell=cell, needless=True))
                continue
            record = self._earlier(earlier, cell)
            if record is not None and (record.counts or (not self.retry_failed and is_result(record, cell.plan, history))):
                results.append(self._reuse(cell, record))
                continue
            if seconds and (stop := self._cool_down()):
                results[-1] = dataclasses.replace(results[-1], stop_signal=stop)
                break
            began = time.monotonic()
            results.append(self._start(cell))
            if (run := results[-1].run) is not None and run.transient and not run.stop_signal and not self._cool_down():
                self.notify(f"{cell.name}: {run.record.cause} Once more.")
                results[-1] = dataclasses.replace(self._start(again(cell)), cell=cell)
            if results[-1].is_last:
                break
            seconds.append(time.monotonic() - began)
            if (run := results[-1].run) is not None and run.stop_signal:
                results[-1] = dataclasses.replace(results[-1], stop_signal=run.stop_signal)
                break
            if left := len(cells) - place - 1:
                rest = left * (statistics.mean(seconds) + self.cooldown_seconds)
                self.notify(f"{place + 1} of {len(cells)} done, {units.seconds(rest)} left if the others take as long.")
        return results

    def _earlier(self, earlier: list[tuple[RunPlan, RunRecord]], cell: Cell) -> RunRecord | None:
        """Return the newest earlier run of a plan that says something about this machine."""
        while (record := take_first(earlier, cell.plan)) is not None:
            if (why := self.differs(cell, record)) is None:
                return record
            if record.counts:
                self.notify(f"{cell.name}: run {record.run_id} does not count here: {why}.")
        return None

    def _reuse(self, cell: Cell, record: RunRecord) -> CellResult:
        if record.counts:
            self.notify(f"{cell.name}: skipped, run {record.run_id} of {record.started_at} counts.")
        else:
            outcome = record.outcome.replace("_", " ")
            self.notify(f"{cell.name}: skipped, run {record.run_id} ended: {outcome}. --resume repeats it.")
        return CellResult(cell=cell, run=self.load(cell, record), reused=True, cause=record.cause)

    def _start(self, cell: Cell) -> CellResult:
        try:
            run = self.start(cell)
        except UserError as error:  # this cell cannot start; the next one may
            self.notify(f"{cell.name}: not started. {error}")
            return CellResult(cell=cell, cause=error.what, is_last=isinstance(error, LostNodeError))
        return CellResult(cell=cell, run=run, cause=run.record.cause)

    def _cool_down(self) -> int | None:
        """Wait between two runs. Return the signal that asked for an end."""
        if self.cooldown_seconds <= 0:
            return None
        self.notify(f"cooling down for {self.cooldown_seconds:g} s.")
        end = time.monotonic() + self.cooldown_seconds
        with Interrupts() as interrupts:
            while (left := end - time.monotonic()) > 0 and not interrupts.count:
                time.sleep(min(left, 0.1))
        return interrupts.first


def is_result(record: RunRecord, plan: RunPlan, history: Sequence[tuple[RunPlan, RunRecord]]) -> bool:
    """Return whether a run that failed says something about its plan.

    One that a time limit or a lost node cut off does not. Where no run of the plan has ever completed, a second one does: the
    plan may be the reason, and would keep all others from their turn.
    """
    if record.outcome not in RESULTS or not record.cut_off:
        return record.outcome in RESULTS
    wanted = configuration(plan)
    same = [other for former, other in history if configuration(former) == wanted]
    return sum(other.cut_off for other in same) > 1 and not any(other.counts for other in same)


def again(cell: Cell) -> Cell:
    """Return a cell whose run has its own id and folder."""
    run_id = f"{cell.plan.run_id}-again"
    folder = str(Path(cell.plan.run_directory).with_name(run_id))
    return dataclasses.replace(cell, plan=dataclasses.replace(cell.plan, run_id=run_id, run_directory=folder))


def interleaved(cells: Sequence[Cell]) -> list[Cell]:
    """Return cells in the order A B C, C B A, A B C: what drifts over hours (heat, other users) then falls on all alike."""
    kinds: list[tuple[dict[str, Any], list[Cell]]] = []
    for cell in cells:
        wanted = configuration(cell.plan)
        found = next((repetitions for kind, repetitions in kinds if kind == wanted), None)
        if found is None:
            kinds.append((wanted, [cell]))
        else:
            found.append(cell)
    rounds = itertools.zip_longest(*(repetitions for _, repetitions in kinds))
    ordered = (one if number % 2 == 0 else one[::-1] for number, one in enumerate(rounds))
    return [cell for one in ordered for cell in one if cell is not None]


def differs_here(cell: Cell, record: RunRecord) -> str | None:
    """Return why a run is from another environment than this one: accelerator, driver, library, variable; None: it was not."""
    variables = variables_of_run(cell.plan.environment)
    return changed_since(
        record, cell.session.machine_of(cell.plan), engine_named(cell.plan.engine).software(cell.plan), variables
    )


def changed_since(record: RunRecord, here: Machine, software: Mapping[str, str], variables: Mapping[str, str]) -> str | None:
    """Return what differs here from a run's environment: accelerator, driver, a library's version, a variable; None: nothing."""
    there = record.nodes[0].accelerator if record.nodes else record.machine.accelerator
    pairs = [("accelerator", there, here.accelerator), ("driver", record.machine.driver, here.driver)]
    pairs += [(name, record.software.get(name), software.get(name)) for name in SAME_SOFTWARE]
    words = (f"{name} {was or 'unknown'} there, {now or 'none'} here" for name, was, now in pairs if was != now)
    return next(words, None) or changed_variable(record.environment, variables)


def run_cells(cells: Sequence[Cell], *, resume: bool, messages: TextIO, retry_failed: bool = True) -> list[CellResult]:
    """Run cells for real, with progress on `messages`. Repetitions are interleaved.

    Raises:
        LaunchError: an output folder cannot be written, another launcher is writing to it, or training lacks a package; nothing
            has been started then.
        SystemExit: this is another node than the first: with the first one's status, once its runs have ended.
    """
    session = cells[0].session
    if engine_named(cells[0].plan.engine).runs_worker:
        require_worker_modules()
    if (status := follow_first_node(cells[0], messages)) is not None:
        sys.exit(status)
    seconds = session.loaded.config.benchmarking.meeting_timeout_seconds
    with contextlib.ExitStack() as open_until_the_end:
        for output in dict.fromkeys(cell.session.output for cell in cells):
            open_until_the_end.enter_context(locked(output, job_name()))
            for run_id in end_unfinished((output / "runs").glob("*/run.json"), lambda _: ABANDONED):
                print(f"run {run_id} has no end recorded, and its launcher is gone: now {ABANDONED.outcome}", file=messages)
        nodes = gathered(session.place, cells[0].plan, seconds, lambda text: print(text, file=messages, flush=True))
        group = open_until_the_end.enter_context(nodes)
        cells = interleaved(cells)
        scheduler = scheduler_of(cells, group, resume=resume, messages=messages)
        results = dataclasses.replace(scheduler, retry_failed=retry_failed).run(cells)
        if group is not None:
            group.status = 0 if complete(results, cells) else 1
        return results


def scheduler_of(cells: Sequence[Cell], group: Group | None, *, resume: bool, messages: TextIO) -> Scheduler:
    """Return how cells become runs for real, on one node or on all of a group."""
    number = {cell.plan.run_id: position for position, cell in enumerate(cells, start=1)}
    fresh_logs: set[Path] = set()

    def start(cell: Cell) -> TrainingRun:
        plan, log = cell.plan, log_path(cell.session, cell.plan.model)
        if log not in fresh_logs:  # an earlier call wrote it; every run keeps a log of its own as well
            with contextlib.suppress(OSError):  # what cannot be removed is reported when it cannot be written
                log.unlink(missing_ok=True)
        fresh_logs.add(log)
        place = f"run {number[plan.run_id]} of {len(cells)}, " if len(cells) > 1 else ""
        print(f"{place}{plan.model}: engine {plan.engine} ({plan.engine_reason})\n{announcement(plan)}", file=messages)
        wait_until_free(plan, lambda text: print(text, file=messages, flush=True))
        ended = run_plan(cell.session, plan, group)
        if len(cells) > 1:
            print(outcome_line(ended.record, ended.metrics, screen_of(messages)), file=messages)
        return ended

    return Scheduler(
        start=start,
        load=lambda cell, record: load_run(cell.session, record),
        notify=lambda text: print(text, file=messages, flush=True),
        differs=differs_here,
        cooldown_seconds=max((cooldown(cell.session) for cell in cells), default=0.0),
        resume=resume,
    )


def wait_until_free(plan: RunPlan, notify: Callable[[str], None]) -> None:
    """Wait until no other program holds memory of the GPUs of a run here, such as the rest of an earlier run.

    Raises:
        LaunchError: a program does not end: its load would distort the measurement.
    """
    if plan.platform != "nvidia":  # AMD's tools list processes by GPU only on some systems
        return
    gpus, ends = gpus_of_ranks(plan.gpus_per_node), time.monotonic() + FREE_WITHIN_SECONDS
    said = False
    with Interrupts() as interrupts:  # a stop is recorded by the run, which ends at once
        while (users := users_of(gpus)) and not interrupts.count:
            listed = "; ".join(f"GPU {user.gpu} by process {user.pid} ({units.gibibytes(user.bytes)})" for user in users)
            if time.monotonic() > ends:
                fix = "end it, or choose other GPUs with CUDA_VISIBLE_DEVICES"
                raise LaunchError(f"In use: {listed}.", where="the GPUs", why="Its load would distort the measurement.", fix=fix)
            if not said:
                notify(f"waiting for GPUs in use: {listed}")
                said = True
            time.sleep(1.0)


def follow_first_node(cell: Cell, messages: TextIO) -> int | None:
    """Do this node's part of the runs of the first one, and return its exit status; None on the first node, which leads.

    Raises:
        LaunchError: the first node does not answer, or refuses.
    """
    place, seconds = cell.session.place, cell.session.loaded.config.benchmarking.meeting_timeout_seconds
    if place.rank == 0:
        return None
    return follow(place, cell.plan, seconds, lambda text: print(text, file=messages, flush=True))


def session_cells(sessions: Iterable[Session]) -> list[Cell]:
    """Return a cell for every plan of some sessions."""
    return [Cell(session=session, plan=plan) for session in sessions for plan in session.plans]


def complete(results: Sequence[CellResult], cells: Sequence[Cell]) -> bool:
    """Return whether every cell that needs a run has one that counts and whose benchmark file could be written."""
    needed = [result for result in results if not result.needless]
    return len(results) == len(cells) and all(result.counts and result.run and result.run.benchmark_file for result in needed)


def exit_status(results: Sequence[CellResult], *, success: bool) -> int:
    """Return 0 for success, 128 and the number of the signal that stopped the runs, or 1."""
    stopped_by = next((result.stop_signal for result in results if result.stop_signal), None)
    return 0 if success else 128 + stopped_by if stopped_by else 1


def cooldown(session: Session) -> float:
    """Return the seconds to wait between two runs."""
    configured = session.loaded.config.benchmarking.cooldown_seconds
    if isinstance(configured, str):
        return 0.0 if session.platform == "cpu" else COOLDOWN_SECONDS_ON_A_GPU
    return configured


def end_unfinished(files: Iterable[Path], failure_of: Callable[[RunRecord], Failure | None]) -> list[str]:
    """Record an end for runs whose launchers ended without one, where there is a failure for it, and return their ids."""
    ended = []
    for path in sorted(files):
        directory = RunDirectory(path.parent)
        try:
            record = directory.read_run()
            if record.outcome == "running" and (failure := failure_of(record)) is not None:
                directory.release_space()
                directory.write_run(with_outcome(record, failure))
                ended.append(record.run_id)
        except RecordError:  # damaged, or not ours to write: reported when the results are read
            continue
    return ended


def configuration(plan: RunPlan) -> dict[str, Any]:
    """Return what two plans must share for their runs to be repetitions of each other."""
    fields = dataclasses.asdict(plan)
    fields["environment"] = masked_environment(plan.environment)  # as plan.json has it
    return {key: value for key, value in fields.items() if key not in RUN_FIELDS}


def earlier_runs(cells: Iterable[Cell]) -> list[tuple[RunPlan, RunRecord]]:
    """Return the runs in the cells' output folders whose plan, record and steps are whole: those that count, the newest first."""
    folders = dict.fromkeys(Path(cell.plan.output_directory) / "runs" for cell in cells)
    files = (path for folder in folders for path in folder.glob("*/run.json"))
    found = [pair for path in files for pair in read_pair(RunDirectory(path.parent))]
    # Runs that count come first, whatever the clock said: it may have been set back since.
    return sorted(found, key=lambda pair: (pair[1].counts, pair[1].started_at or ""), reverse=True)


def read_pair(directory: RunDirectory) -> Iterator[tuple[RunPlan, RunRecord]]:
    """Yield plan and record, or nothing where one is missing or damaged: such a run is repeated."""
    try:
        yield read_plan(directory.plan_file), directory.read_whole()[0]
    except RecordError:
        return


def take_first(earlier: list[tuple[RunPlan, RunRecord]], plan: RunPlan) -> RunRecord | None:
    """Remove the first of the earlier runs of a plan from the list and return its record."""
    wanted = configuration(plan)
    for index, (former, record) in enumerate(earlier):
        if configuration(former) == wanted:
            del earlier[index]
            return record
    return None
