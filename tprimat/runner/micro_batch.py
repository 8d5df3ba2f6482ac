"""Find the micro-batch of a plan that says "auto", before its run.

Training steps of growing size run in processes of their own. A process that runs out of memory is an answer. The run itself
then starts fresh from a plan with a number, so that nothing of the search (allocator fragments, compiled graphs of other sizes)
affects the measurement.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from tprimat.core import units
from tprimat.launch.run import LaunchResult
from tprimat.plan.micro_batch import candidates, largest_that_fits, next_candidate, searched, with_micro_batch
from tprimat.plan.schema import RunPlan, write_plan
from tprimat.records.schema import Failure, MicroBatchSearch, MicroBatchTrial
from tprimat.records.store import RunDirectory

LESS_MEMORY = "a strategy that splits the weights further, a shorter --sequence-length, or recompute: full in the configuration"
Start = Callable[[RunPlan], LaunchResult]
"""Starts the ranks on a plan and follows them to their end."""


def find_micro_batch(plan: RunPlan, start: Start, say: Callable[[str], None]) -> RunPlan | LaunchResult:
    """Look for the largest micro-batch that fits.

    Returns:
        the plan with the number, and how it was found; or the end of an attempt that was stopped, that failed otherwise than
        for memory, or that could not run the smallest size.

    Raises:
        LaunchError: the ranks cannot be started here.
        RecordError: the run's folder cannot be written.
    """
    sizes = candidates(plan.workload)
    say(f"{plan.model}: looking for the largest micro-batch that fits, of {', '.join(map(str, sizes))}")
    trials: tuple[MicroBatchTrial, ...] = ()
    attempt = 0
    while (size := next_candidate(sizes, trials)) is not None:
        attempt += 1
        trials, result = try_sizes(plan, trials, Path(plan.run_directory, "micro_batch", str(attempt)), start)
        if result.failure is not None and result.failure.outcome == "out_of_memory":
            size = next_candidate(sizes, trials) or size
            trials = (*trials, MicroBatchTrial(micro_batch_sequences=size, peak_bytes=None, limit_bytes=None))
        elif result.failure is not None or next_candidate(sizes, trials) is not None:
            why = result.failure or Failure(outcome="failed", cause="the ranks ended without an answer.")
            cause = f"While looking for a micro-batch that fits: {why.cause}"
            return dataclasses.replace(result, failure=dataclasses.replace(why, cause=cause))
    found, search = largest_that_fits(trials), searched(sizes, trials)
    if found is None:
        cause = f"No micro-batch fits: {described(search)}."
        hint = result.failure.hint if result.failure else None
        return dataclasses.replace(result, failure=Failure(outcome="out_of_memory", cause=cause, hint=hint or LESS_MEMORY))
    say(f"{plan.model}: micro-batch {found}, the largest that fits: {described(search)}")
    return with_micro_batch(plan, search, found)


def try_sizes(
    plan: RunPlan, before: Sequence[MicroBatchTrial], folder: Path, start: Start
) -> tuple[tuple[MicroBatchTrial, ...], LaunchResult]:
    """Start the ranks once; they try sizes until they know the answer or run out of memory.

    Returns:
        all trials so far, and how the attempt ended.
    """
    directory = RunDirectory(folder)
    steps = len(candidates(plan.workload)) + 1  # at most all sizes, after one step that makes the optimizer's states
    write_plan(directory.plan_file, dataclasses.replace(plan, run_directory=str(folder), steps=steps))
    for trial in before:
        directory.append_trial(trial)
    result = start(dataclasses.replace(plan, run_directory=str(folder), steps=steps))
    return directory.read_trials(), result


def described(search: MicroBatchSearch) -> str:
    """Describe what was tried, by size, and what the other sizes would need."""
    made = {trial.micro_batch_sequences: _tried(trial) for trial in search.trials}
    made |= {size: f"{size} would take {units.gibibytes(peak)}" for size, peak in search.predicted_bytes.items()}
    limits = [trial.limit_bytes for trial in search.trials if trial.limit_bytes is not None]
    most = f"; a rank may fill {units.gibibytes(min(limits))}" if limits else ""
    return ", ".join(made[size] for size in sorted(made)) + most


def _tried(trial: MicroBatchTrial) -> str:
    size, peak = trial.micro_batch_sequences, trial.peak_bytes
    return f"{size} runs out of memory" if peak is None else f"{size} takes {units.gibibytes(peak)}"
