"""Carries out plans one after the other, of one folder of results or of several, and finds earlier runs again."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tprimat.cli.session import Session
from tprimat.cli.training import TrainingRun, announcement, earlier_run, log_path, start
from tprimat.errors import LaunchError
from tprimat.launch.schema import LaunchResult
from tprimat.launch.sweep import CellResult, Sweep
from tprimat.plan.schema import RunPlan
from tprimat.record.schema import RunRecord

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
