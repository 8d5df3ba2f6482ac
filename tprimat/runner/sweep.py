"""Make runs in order: reuse earlier ones, cool down in between, and go on when one fails.

The records are the only state: a sweep that was stopped goes on from what is on disk.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tprimat.errors import LaunchError, RecordError, UserError
from tprimat.launch.process import Interrupts
from tprimat.plan.micro_batch import as_asked
from tprimat.plan.schema import RunPlan, read_plan
from tprimat.records.redaction import masked_environment
from tprimat.records.schema import RunRecord
from tprimat.records.store import RunDirectory
from tprimat.report.screen import screen_of
from tprimat.runner.progress import outcome_line
from tprimat.runner.run import TrainingRun, announcement, load_run, log_path, run_plan
from tprimat.runner.session import Session

COOLDOWN_SECONDS_ON_A_GPU = 20.0
"""Between runs, for drivers to release memory and for clocks and temperature to settle."""
RUN_FIELDS = {"run_id", "run_directory", "output_directory", "engine_reason", "trainer", "command"}
"""Fields of a plan that differ between two runs of the same configuration, and the trainer, which older plans lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run to make."""

    session: Session
    plan: RunPlan

    @property
    def name(self) -> str:
        """Model and strategy."""
        return f"{self.plan.model} {self.plan.strategy}"


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
    cooldown_seconds: float = 0.0
    resume: bool = True

    def run(self, cells: Sequence[Cell]) -> list[CellResult]:
        """Run all cells in order. A failure stops no other cell; a stop by the user leaves the rest without a result.

        With `resume`, the newest earlier run of a plan decides: if it counts, it is reused; otherwise the plan runs. Where a plan
        occurs more than once (repetitions), the second newest run decides for the second cell, and so on.
        """
        earlier = earlier_runs(cells) if self.resume else []
        results: list[CellResult] = []
        started = False
        for cell in cells:
            record = take_newest(earlier, cell.plan)
            if record is not None and record.counts:
                self.notify(f"{cell.name}: skipped, run {record.run_id} of {record.started_at} counts.")
                results.append(CellResult(cell=cell, run=self.load(cell, record), reused=True))
                continue
            if started and not self._cool_down():
                break
            started = True
            results.append(self._start(cell))
            run = results[-1].run
            if run is not None and run.stopped:
                break
        return results

    def _start(self, cell: Cell) -> CellResult:
        try:
            run = self.start(cell)
        except UserError as error:  # this cell cannot start; the next one may
            self.notify(f"{cell.name}: not started. {error}")
            return CellResult(cell=cell, cause=error.what)
        return CellResult(cell=cell, run=run, cause=run.record.cause)

    def _cool_down(self) -> bool:
        """Wait between two runs. Return False when a signal asked for an end."""
        if self.cooldown_seconds <= 0:
            return True
        self.notify(f"cooling down for {self.cooldown_seconds:g} s.")
        end = time.monotonic() + self.cooldown_seconds
        with Interrupts() as interrupts:
            while (left := end - time.monotonic()) > 0 and not interrupts.count:
                time.sleep(min(left, 0.1))
        return not interrupts.count


def run_cells(cells: Sequence[Cell], *, quiet: bool, resume: bool, messages: TextIO) -> list[CellResult]:
    """Run cells for real, with progress on `messages`.

    Raises:
        LaunchError: an output folder cannot be written; nothing has been started then.
    """
    for output in dict.fromkeys(cell.session.output for cell in cells):
        make_writable(output)
    number = {cell.plan.run_id: position for position, cell in enumerate(cells, start=1)}
    fresh_logs: set[Path] = set()

    def start(cell: Cell) -> TrainingRun:
        plan, log = cell.plan, log_path(cell.session, cell.plan.model)
        if log not in fresh_logs:  # an earlier call wrote it; every run keeps a log of its own as well
            log.unlink(missing_ok=True)
        fresh_logs.add(log)
        if not quiet:
            place = f"run {number[plan.run_id]} of {len(cells)}, " if len(cells) > 1 else ""
            print(f"{place}{plan.model}: engine {plan.engine} ({plan.engine_reason})\n{announcement(plan)}", file=messages)
        ended = run_plan(cell.session, plan, quiet=quiet)
        if len(cells) > 1 and not quiet:
            print(outcome_line(ended.record, ended.metrics, screen_of(messages)), file=messages)
        return ended

    scheduler = Scheduler(
        start=start,
        load=lambda cell, record: load_run(cell.session, record),
        notify=lambda text: print(text, file=messages),
        cooldown_seconds=max((cooldown(cell.session) for cell in cells), default=0.0),
        resume=resume,
    )
    return scheduler.run(cells)


def session_cells(sessions: Iterable[Session]) -> list[Cell]:
    """Return a cell for every plan of some sessions."""
    return [Cell(session=session, plan=plan) for session in sessions for plan in session.plans]


def complete(results: Sequence[CellResult], cells: Sequence[Cell]) -> bool:
    """Return whether every cell has a run that counts and whose benchmark file could be written."""
    return len(results) == len(cells) and all(result.counts and result.run and result.run.benchmark_file for result in results)


def cooldown(session: Session) -> float:
    """Return the seconds to wait between two runs."""
    configured = session.loaded.config.benchmarking.cooldown_seconds
    if isinstance(configured, str):
        return 0.0 if session.platform == "cpu" else COOLDOWN_SECONDS_ON_A_GPU
    return configured


def make_writable(output: Path) -> None:
    """Create the output folder, and check before training that results can be written.

    Raises:
        LaunchError: they cannot.
    """
    probe = output / ".writable"
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        what = f"The output folder {output} cannot be written: {error.strerror}."
        raise LaunchError(what, where="--output-dir", fix="--output-dir with a folder of yours, or free some space") from error


def configuration(plan: RunPlan) -> dict[str, Any]:
    """Return what two plans must share for their runs to be repetitions of each other."""
    fields = dataclasses.asdict(as_asked(plan))
    fields["environment"] = masked_environment(plan.environment, marked=True)  # as plan.json has it
    return {key: value for key, value in fields.items() if key not in RUN_FIELDS}


def earlier_runs(cells: Iterable[Cell]) -> list[tuple[RunPlan, RunRecord]]:
    """Return the runs in the cells' output folders whose plan and record are both readable, newest first."""
    folders = dict.fromkeys(Path(cell.plan.output_directory) / "runs" for cell in cells)
    files = (path for folder in folders for path in folder.glob("*/run.json"))
    found = [pair for path in files for pair in read_pair(RunDirectory(path.parent))]
    return sorted(found, key=lambda pair: pair[1].started_at or "", reverse=True)


def read_pair(directory: RunDirectory) -> Iterator[tuple[RunPlan, RunRecord]]:
    """Yield plan and record, or nothing where one is missing or damaged: such a run is made again."""
    try:
        yield read_plan(directory.plan_file), directory.read_run()
    except RecordError:
        return


def take_newest(earlier: list[tuple[RunPlan, RunRecord]], plan: RunPlan) -> RunRecord | None:
    """Remove the newest earlier run of a plan from the list and return its record."""
    wanted = configuration(plan)
    for index, (former, record) in enumerate(earlier):
        if configuration(former) == wanted:
            del earlier[index]
            return record
    return None
