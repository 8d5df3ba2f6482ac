"""Many runs, one after the other: what was done before is not done again, and a run that fails stops no other."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tprimat.errors import LaunchError, RecordError, UserError
from tprimat.launch.process import Interrupts
from tprimat.launch.run import LaunchResult
from tprimat.plan.micro_batch import as_asked
from tprimat.plan.schema import RunPlan, read_plan
from tprimat.records.schema import RunRecord
from tprimat.records.store import RunDirectory
from tprimat.runner.run import TrainingRun, announcement, earlier_run, log_path, start
from tprimat.runner.session import Session

OF_ONE_RUN = {"run_id", "run_directory", "output_directory", "engine_reason", "command"}
"""Fields of a plan that differ between two runs of the same thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What became of one cell of a sweep."""

    plan: RunPlan
    record: RunRecord | None
    """None: nothing was started."""
    skipped: bool = False
    """An earlier run of the same plan counts; `record` is that run's."""
    cause: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """How a series of runs is carried out."""

    start: Callable[[RunPlan], tuple[RunRecord, LaunchResult]]
    runs_folders: tuple[Path, ...]
    """Each holds one folder a run; searched for earlier runs."""
    cooldown_seconds: float
    say: Callable[[str], None]
    resume: bool = True

    def run(self, plans: Sequence[RunPlan]) -> tuple[CellResult, ...]:
        """Carry out all plans, in order. A stop that the user asks for ends the series; the rest has no result.

        The newest earlier run of a plan decides: if it counts, it is taken, otherwise the plan runs. Where a plan stands more
        than once (repetitions), the second newest decides for its second place, and so on.
        """
        earlier = earlier_runs(self.runs_folders) if self.resume else []
        results: list[CellResult] = []
        ran = False
        for plan in plans:
            former = take_newest(earlier, plan)
            if former is not None and former.counts:
                self.say(f"{name(plan)}: skipped, run {former.run_id} of {former.started_at} counts.")
                results.append(CellResult(plan=plan, record=former, skipped=True))
                continue
            if ran and not self._cool_down():
                break
            ran = True
            result, go_on = self._run(plan)
            results.append(result)
            if not go_on:
                break
        return tuple(results)

    def _run(self, plan: RunPlan) -> tuple[CellResult, bool]:
        try:
            record, result = self.start(plan)
        except UserError as error:  # this cell cannot start; the next one may
            self.say(f"{name(plan)}: not started. {error}")
            return CellResult(plan=plan, record=None, cause=error.what), True
        return CellResult(plan=plan, record=record, cause=record.cause), not result.stop_requested

    def _cool_down(self) -> bool:
        """Wait; False when a signal asked for an end."""
        if self.cooldown_seconds <= 0:
            return True
        self.say(f"cooling down for {self.cooldown_seconds:g} s.")
        end = time.monotonic() + self.cooldown_seconds
        with Interrupts() as interrupts:
            while (left := end - time.monotonic()) > 0 and not interrupts.count:
                time.sleep(min(left, 0.1))
        return not interrupts.count


def name(plan: RunPlan) -> str:
    """A cell for people."""
    return f"{plan.model} {plan.strategy}"


def essence(plan: RunPlan) -> dict[str, Any]:
    """What two runs must share to be repetitions of each other."""
    fields = dataclasses.asdict(as_asked(plan))
    return {key: value for key, value in fields.items() if key not in OF_ONE_RUN}


def earlier_runs(folders: Iterable[Path]) -> list[tuple[RunPlan, RunRecord]]:
    """The runs under some folders that have both files whole, the newest first."""
    files = (path for folder in folders for path in folder.glob("*/run.json"))
    found = [pair for path in files for pair in read_pair(RunDirectory(path.parent))]
    return sorted(found, key=lambda pair: pair[1].started_at or "", reverse=True)


def read_pair(directory: RunDirectory) -> Iterator[tuple[RunPlan, RunRecord]]:
    """Plan and record, or nothing where one is missing or damaged: such a run is done again."""
    try:
        yield read_plan(directory.plan_file), directory.read_run()
    except RecordError:
        return


def take_newest(earlier: list[tuple[RunPlan, RunRecord]], plan: RunPlan) -> RunRecord | None:
    """The newest earlier run of a plan, which is then gone from the list."""
    wanted = essence(plan)
    for index, (former, record) in enumerate(earlier):
        if essence(former) == wanted:
            del earlier[index]
            return record
    return None


# Carries out plans one after the other, of one folder of results or of several, and finds earlier runs again.

COOLDOWN_SECONDS_ON_A_GPU = 20.0
"""Between runs: drivers release memory, clocks and temperature settle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run to be made."""

    session: Session
    plan: RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What became of a cell."""

    cell: Cell
    result: CellResult
    run: TrainingRun | None
    """None: nothing was started. An earlier run that counts stands for the cell."""

    @property
    def counts(self) -> bool:
        """Whether there is a run that an analysis may count."""
        return self.run is not None and self.run.record.counts


def carry_out(cells: Sequence[Cell], *, quiet: bool, resume: bool, messages: TextIO) -> list[Done]:
    """All cells in order. A failure stops none of the others; what the user stops ends the series, and the rest has no result.

    Raises:
        LaunchError: a folder of results cannot be written; nothing has been started then.
    """
    for output in dict.fromkeys(cell.session.output for cell in cells):
        make_writable(output)
    by_id = {cell.plan.run_id: cell for cell in cells}
    place = {cell.plan.run_id: f"run {number} of {len(cells)}, " for number, cell in enumerate(cells, start=1) if len(cells) > 1}
    runs: dict[str, TrainingRun] = {}
    logs: set[Path] = set()

    def start_one(plan: RunPlan) -> tuple[RunRecord, LaunchResult]:
        log = log_path(by_id[plan.run_id].session, plan.model)
        if log not in logs:  # of an earlier call; every run keeps a log of its own as well
            log.unlink(missing_ok=True)
        logs.add(log)
        if not quiet:
            where = place.get(plan.run_id, "")
            print(f"{where}{plan.model}: engine {plan.engine} ({plan.engine_reason})\n{announcement(plan)}", file=messages)
        runs[plan.run_id], result = start(by_id[plan.run_id].session, plan, quiet=quiet)
        return runs[plan.run_id].record, result

    sweep = Sweep(
        start=start_one,
        runs_folders=tuple(dict.fromkeys(cell.session.output / "runs" for cell in cells)),
        cooldown_seconds=max((cooldown(cell.session) for cell in cells), default=0.0),
        say=lambda text: print(text, file=messages),
        resume=resume,
    )
    return [_done(by_id[result.plan.run_id], result, runs) for result in sweep.run([cell.plan for cell in cells])]


def _done(cell: Cell, result: CellResult, runs: dict[str, TrainingRun]) -> Done:
    if result.skipped and result.record is not None:
        return Done(cell=cell, result=result, run=earlier_run(cell.session, result.record))
    return Done(cell=cell, result=result, run=runs.get(result.plan.run_id))


def cooldown(session: Session) -> float:
    """Seconds between two runs."""
    asked = session.loaded.config.benchmarking.cooldown_seconds
    if isinstance(asked, str):
        return 0.0 if session.platform == "cpu" else COOLDOWN_SECONDS_ON_A_GPU
    return asked


def make_writable(output: Path) -> None:
    """Find out before training that results can be kept.

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
