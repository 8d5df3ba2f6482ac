"""Make the runs of cells in order: reuse earlier runs, cool down in between, and continue when one fails.

The records are the only state: a stopped call continues from what is on disk.
"""

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tprimat.core import units
from tprimat.core.errors import LaunchError, RecordError, UserError
from tprimat.engines.base import engine_named, require_worker_modules
from tprimat.hardware.gpus import users_of
from tprimat.hardware.nodes import gpus_of_ranks
from tprimat.launch.agreement import LostNodeError, NodeGroup
from tprimat.launch.process import Interrupts
from tprimat.launch.run import with_outcome
from tprimat.plan.schema import RunPlan, read_plan
from tprimat.records.environment import changed_variable, variables_of_run
from tprimat.records.lock import locked
from tprimat.records.schema import Failure, RunRecord
from tprimat.records.store import RunDirectory
from tprimat.report.tables import screen_of
from tprimat.runner.cells import Cell, CellResult, configuration
from tprimat.runner.nodes import follow, gathered
from tprimat.runner.progress import outcome_line, say
from tprimat.runner.run import TrainingRun, announcement, load_run, log_path, run_plan

FREE_WITHIN_SECONDS = 30.0
"""For an earlier run's processes to give their memory back."""
COOLDOWN_SECONDS_ON_A_GPU = 20.0
"""Between runs, for drivers to release memory and for clocks and temperature to settle."""
RESULTS = {"failed", "out_of_memory", "diverged", "timed_out", "hung"}
"""Outcomes that say something about a cell. Interrupted runs, those cut off, and those without an end do not."""
SAME_SOFTWARE = ("torch", "megatron-core", "nemo-toolkit", "transformer-engine", "triton", "torchao", "torchtitan", "primus")
"""Packages whose versions make two runs different measurements."""
ABANDONED = Failure(
    outcome="interrupted",
    cause="The launcher ended before it could record how: it was killed, or the disk was full.",
    hint="--resume repeats the run",
)


def run_cells(cells: Sequence[Cell], *, resume: bool, retry_failed: bool = True) -> list[CellResult]:
    """Make the runs of cells, with progress on stderr. Repetitions are interleaved.

    Raises LaunchError: an output folder cannot be written, another launcher is writing to it, or training lacks a package;
    nothing has been started then; SystemExit: this is another node than the first: with the first one's status, once its runs
    have ended.
    """
    session, plan = cells[0].session, cells[0].plan
    seconds = session.loaded.config.benchmarking.meeting_timeout_seconds
    if engine_named(plan.engine).runs_worker:
        require_worker_modules()
    if session.place.rank != 0:
        sys.exit(follow(session.place, plan, seconds, say))
    with contextlib.ExitStack() as open_until_the_end:
        for output in dict.fromkeys(cell.session.output for cell in cells):
            open_until_the_end.enter_context(locked(output))
            for run_id in end_abandoned(output):
                say(f"run {run_id} has no end recorded, and its launcher is gone: now {ABANDONED.outcome}")
        group = open_until_the_end.enter_context(gathered(session.place, plan, seconds, say))
        results = run_in_order(interleaved(cells), group, resume=resume, retry_failed=retry_failed)
        if group is not None:
            group.status = 0 if complete(results, cells) else 1
        return results


def run_in_order(
    cells: Sequence[Cell], group: NodeGroup | None = None, *, resume: bool = True, retry_failed: bool = True
) -> list[CellResult]:
    """Make the runs of cells. A failure stops no other cell; a lost node or the user's stop leaves the rest without a result.

    With `resume`, an earlier run of a plan that counts is reused, the newest first; without one the plan runs. A plan that occurs
    several times (repetitions) gets a run for each cell. Without `retry_failed`, a cell whose newest run failed is not made
    again: a failure is a result too.
    """
    earlier = earlier_runs(cells) if resume else {}
    pause = max((cooldown(cell) for cell in cells), default=0.0)
    results: list[CellResult] = []
    seconds: list[float] = []
    logs: set[Path] = set()
    with Interrupts() as interrupts:  # so that a signal breaks off no writing between two runs
        for place, cell in enumerate(cells, 1):
            record = earlier_of(cell, earlier)
            if record is not None and (record.counts or (not retry_failed and is_result(record))):
                ended = f"ended: {record.outcome.replace('_', ' ')}. --resume repeats it."
                how = f"of {record.started_at} counts." if record.counts else ended
                say(f"{cell.name}: skipped, run {record.run_id} {how}")
                results.append(CellResult(cell=cell, run=load_run(cell.session, record), reused=True, cause=record.cause))
                continue
            if seconds:
                cool_down(pause, interrupts)
            if interrupts.first is not None:
                break
            began = time.monotonic()
            try:
                run = make_run(cell, logs, group, f"run {place} of {len(cells)}, " if len(cells) > 1 else "")
                results.append(CellResult(cell=cell, run=run, cause=run.record.cause))
            except UserError as error:  # this cell cannot start; the next one may
                say(f"{cell.name}: not started. {error}")
                results.append(CellResult(cell=cell, cause=error.what))
                if isinstance(error, LostNodeError):
                    break
            if interrupts.first is not None:
                break
            seconds.append(time.monotonic() - began)
            if left := len(cells) - place:
                rest = units.seconds(left * (statistics.mean(seconds) + pause))
                say(f"{place} of {len(cells)} done, {rest} left if the others take as long.")
    if results and interrupts.first is not None:
        results[-1] = replace(results[-1], stop_signal=interrupts.first)
    return results


def earlier_of(cell: Cell, earlier: dict[str, list[RunRecord]]) -> RunRecord | None:
    """Return the newest earlier run of a plan that says something about this machine, and remove it from the others."""
    same = earlier.get(configuration(cell.plan), [])
    while same:
        record = same.pop(0)
        if (why := differs_here(cell, record)) is None:
            return record
        if record.counts:
            say(f"{cell.name}: run {record.run_id} does not count here: {why}.")
    return None


def cool_down(seconds: float, interrupts: Interrupts) -> None:
    """Wait between two runs, unless a signal comes."""
    if seconds > 0:
        say(f"cooling down for {seconds:g} s.")
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not interrupts.seen:
        time.sleep(min(left, 0.1))


def make_run(cell: Cell, logs: set[Path], group: NodeGroup | None, which: str) -> TrainingRun:
    """Make the run of a cell. `logs` are those of this call; an earlier call's is removed, as each run keeps one of its own."""
    plan, log = cell.plan, log_path(cell.session, cell.plan.model)
    if log not in logs:
        with contextlib.suppress(OSError):  # what cannot be removed is reported when it cannot be written
            log.unlink(missing_ok=True)
    logs.add(log)
    remark, heading = engine_named(plan.engine).remark(plan), f"{which}{plan.model}: engine {plan.engine} ({plan.engine_reason})"
    say("\n".join(filter(None, [heading, announcement(plan), remark])))
    wait_until_free(plan)
    run = run_plan(cell.session, plan, group)
    if which:
        say(outcome_line(run.record, run.metrics, screen_of(sys.stderr)))
    return run


def differs_here(cell: Cell, record: RunRecord) -> str | None:
    """Return what differs here from the environment of an earlier run: accelerator, driver, a library's version, a variable."""
    here, software = cell.session.machine_of(cell.plan), engine_named(cell.plan.engine).software(cell.plan)
    there = record.nodes[0].accelerator if record.nodes else record.machine.accelerator
    pairs = [("accelerator", there, here.accelerator), ("driver", record.machine.driver, here.driver)]
    pairs += [(name, record.software.get(name), software.get(name)) for name in SAME_SOFTWARE]
    words = (f"{name} {was or 'unknown'} there, {now or 'none'} here" for name, was, now in pairs if was != now)
    return next(words, None) or changed_variable(record.environment, variables_of_run(cell.plan.environment))


def wait_until_free(plan: RunPlan) -> None:
    """Wait until no other program holds memory of the GPUs of a run here, such as the rest of an earlier run."""
    if plan.platform != "nvidia":  # AMD's tools list processes by GPU only on some systems
        return
    gpus, began, said = gpus_of_ranks(plan.gpus_per_node), time.monotonic(), False
    with Interrupts() as interrupts:  # a stop is recorded by the run, which ends at once
        while (users := users_of(gpus)) and not interrupts.seen:
            listed = "; ".join(users)
            if time.monotonic() > began + FREE_WITHIN_SECONDS:
                why, fix = "Its load would distort the measurement.", "end it, or choose others with CUDA_VISIBLE_DEVICES"
                raise LaunchError(f"In use: {listed}.", where="the GPUs", why=why, fix=fix)
            if not said:
                say(f"waiting for GPUs in use: {listed}")
                said = True
            time.sleep(1.0)


def is_result(record: RunRecord) -> bool:
    """Return whether a run that failed says something about its plan; one that a time limit or a lost node cut off does not."""
    return record.outcome in RESULTS and not record.cut_off


def interleaved(cells: Sequence[Cell]) -> list[Cell]:
    """Return cells in the order A B C, C B A, A B C: what drifts over hours (heat, other users) then falls on all alike."""
    kinds: dict[str, list[Cell]] = {}
    for cell in cells:
        kinds.setdefault(configuration(cell.plan), []).append(cell)
    rounds = itertools.zip_longest(*kinds.values())
    ordered = (one if number % 2 == 0 else one[::-1] for number, one in enumerate(rounds))
    return [cell for one in ordered for cell in one if cell is not None]


def complete(results: Sequence[CellResult], cells: Sequence[Cell]) -> bool:
    """Return whether every cell has a run that counts and whose benchmark file could be written."""
    return len(results) == len(cells) and all(one.counts and one.run and one.run.benchmark_file for one in results)


def exit_status(results: Sequence[CellResult], *, success: bool) -> int:
    """Return 0 for success, 128 and the number of the signal that stopped the runs, or 1."""
    stopped_by = next((result.stop_signal for result in results if result.stop_signal), None)
    return 0 if success else 128 + stopped_by if stopped_by else 1


def cooldown(cell: Cell) -> float:
    """Return the seconds to wait between two runs."""
    configured = cell.session.loaded.config.benchmarking.cooldown_seconds
    if isinstance(configured, str):
        return 0.0 if cell.session.platform == "cpu" else COOLDOWN_SECONDS_ON_A_GPU
    return configured


def end_abandoned(output: Path) -> list[str]:
    """Record an end for the runs of a folder whose launchers were killed, remove what they half wrote, and return their ids."""
    ended = []
    for path in [*output.glob(".*.json.*"), *output.glob("runs/*/.*.json.*")]:
        if path.suffix[1:].isdecimal():  # the process id behind it held the folder, and has ended
            with contextlib.suppress(OSError):
                path.unlink()
    for path in sorted((output / "runs").glob("*/run.json")):
        directory = RunDirectory(path.parent)
        with contextlib.suppress(RecordError):  # damaged, or not ours to write: reported when the results are read
            record = directory.read_run()
            if record.outcome == "running":
                directory.release_space()
                directory.write_run(with_outcome(record, ABANDONED))
                ended.append(record.run_id)
    return ended


def earlier_runs(cells: Iterable[Cell]) -> dict[str, list[RunRecord]]:
    """Return the runs in the cells' output folders by configuration: those that count, the newest first.

    One whose plan, record or steps are missing or damaged is left out, and so repeated.
    """
    runs: dict[str, list[RunRecord]] = {}
    for folder in dict.fromkeys(Path(cell.plan.output_directory) / "runs" for cell in cells):
        for path in folder.glob("*/run.json"):
            directory = RunDirectory(path.parent)
            with contextlib.suppress(RecordError):
                record = directory.read_whole()[0]
                runs.setdefault(configuration(read_plan(directory.plan_file)), []).append(record)
    for same in runs.values():  # those that count come first, whatever the clock said: it may have been set back since
        same.sort(key=lambda record: (record.counts, record.started_at or ""), reverse=True)
    return runs
