"""Many runs, one after the other: what was done before is not done again, and a run that fails stops no other."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tprimat.errors import RecordError, UserError
from tprimat.launch.interrupts import Interrupts
from tprimat.launch.schema import LaunchResult
from tprimat.plan.file import read_plan
from tprimat.plan.micro_batch import as_asked
from tprimat.plan.schema import RunPlan
from tprimat.record.schema import RunRecord
from tprimat.record.store import RunDirectory

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
