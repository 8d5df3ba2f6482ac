"""The trainings of Qwen3 8B in order: in full on the embedded engine, in full and by LoRA through torchtune.

Each job has its own folder, OUTPUT/qwen3-8b/JOB. A job that has a run that counts is not repeated; a job that fails leaves a
record of the cause, and the next one starts.
"""

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from benchmarks.finetune_qwen3.embedded import LIMIT_FLAG, MODEL, PRECISIONS, Training, embedded_command
from benchmarks.finetune_qwen3.torchtune_recipes import (
    MODES,
    input_commands,
    inputs_in,
    read_steps,
    torchtune_command,
    torchtune_refusal,
)
from tprimat.core.errors import LaunchError
from tprimat.core.workload import Workload
from tprimat.engines.base import Command
from tprimat.launch.process import DEFAULT_LIMIT_SECONDS, Ending, run_command
from tprimat.logs.failures import classify
from tprimat.records.benchmark_file import RunResult
from tprimat.records.discover import load_results
from tprimat.records.schema import Failure, Machine, Outcome, RunRecord
from tprimat.records.store import RunDirectory

EMBEDDED = tuple(f"embedded-full-{precision}" for precision in PRECISIONS)
TORCHTUNE = tuple(f"torchtune-{mode}" for mode in MODES)
GROUPS = {"embedded": EMBEDDED, "torchtune": TORCHTUNE}
"""Name for several jobs -> their names."""
LINES_FOR_CAUSE = 2000
"""Last lines of a job's output, searched for the cause of a failure."""
STOP_SECONDS = 60
"""Seconds beyond the limit in which an engine can stop by itself and write its record."""
LONGER = f"raise {LIMIT_FLAG}, or lower --train-steps"
REFUSED = "refused"
"""Run folder of a job that left no record itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run."""

    name: str
    """Engine, method and dtype: 'embedded-full-bf16'."""
    engine: str
    dtype: str
    command: Callable[[Training], Command]
    inputs: Callable[[Training], Sequence[Command]] = lambda _: ()
    """Commands that write what the job reads; each must succeed."""
    read: Callable[[], str | None] = lambda: None
    """Makes a record of the process's output. Returns why there is none."""


def job_folder(output: Path, name: str) -> Path:
    """Return the folder of a job's files."""
    return output / MODEL / name


def jobs(output: Path, training: Training, checkpoint: str | None, skip: Set[str]) -> list[Job]:
    """Return the jobs that can run here and are not skipped, those of the embedded engine first.

    Args:
        output: results folder.
        training: what all runs share.
        checkpoint: folder of Qwen3 8B's weights for torchtune, or 'random'; None: no torchtune.
        skip: names of jobs.
    """
    jobs = []
    for precision, name in zip(PRECISIONS, EMBEDDED, strict=True):
        command = partial(embedded_command, precision, job_folder(output, name))
        jobs.append(Job(name=name, engine="megatron", dtype=precision, command=command))
    machine = training.machine
    if checkpoint is not None and machine is not None and not torchtune_refusal(checkpoint):
        inputs = inputs_in(output, checkpoint)
        for mode, name in zip(MODES, TORCHTUNE, strict=True):
            folder = job_folder(output, name)
            jobs.append(
                Job(
                    name=name,
                    engine="torchtune",
                    dtype=mode.partition("-")[2],
                    command=partial(torchtune_command, mode, folder, inputs),
                    inputs=partial(input_commands, inputs),
                    read=partial(read_steps, folder, training.ranks, machine.accelerator),
                )
            )
    return [job for job in jobs if job.name not in skip]


def run_jobs(jobs: Sequence[Job], output: Path, training: Training, ends: float | None) -> bool:
    """Run all jobs in order, as far as the time budget allows.

    Args:
        jobs: in the order in which they run.
        output: results folder.
        training: what all runs share.
        ends: on time.monotonic. No job starts after it, and a running one is stopped a minute later.

    Returns:
        False if the user stopped it.
    """
    for job in jobs:
        left = None if ends is None else ends - time.monotonic()
        if left is not None and left <= 0:
            log(f"{job.name}: skipped, the time budget is spent")
            continue
        log(f"{job.name}:")
        try:
            if not run_job(job, output, replace(training, limit_seconds=left), log):
                return False
        except LaunchError as error:
            log(f"{job.name}: {error}")
    return True


def run_job(job: Job, output: Path, training: Training, on_line: Callable[[str], None]) -> bool:
    """Run a job unless it has a run that counts, and leave a record of its outcome.

    Returns:
        False if the user stopped it.
    """
    folder = job_folder(output, job.name)
    done = newest_result(folder)
    if done is not None and done.run.counts:
        on_line(f"{job.name}: done before")
        return True
    refusal = RunDirectory(folder / "runs" / REFUSED)
    with contextlib.suppress(FileNotFoundError):
        refusal.run_file.unlink()
    before = {result.run.run_id for result in results_in(folder)}
    ending, lines, command = run_commands(job, training, on_line)
    failure = None if ending.exit_code == 0 else failure_of(ending, lines)
    if failure is None and (problem := job.read()):
        failure = Failure(outcome="failed", cause=problem)
    recorded = [result.run for result in results_in(folder) if result.run.run_id not in before]
    if failure and not recorded:
        refusal.write_run(failed_run(job, training, failure, command.argv))
    cause = next((run.cause for run in recorded if run.cause), None)
    on_line(f"{job.name}: {cause or (failure.cause if failure else 'completed')}")
    return ending.stopped is None or ending.stopped.outcome != "interrupted"


def run_commands(job: Job, training: Training, on_line: Callable[[str], None]) -> tuple[Ending, list[str], Command]:
    """Write the job's inputs and run it; returns the first ending that was not successful, its lines and its command."""
    lines: deque[str] = deque(maxlen=LINES_FOR_CAUSE)

    def keep(line: str) -> None:
        lines.append(line)
        on_line(line)

    seconds = DEFAULT_LIMIT_SECONDS if training.limit_seconds is None else training.limit_seconds
    limited = replace(training, limit_seconds=seconds)
    for command in (*job.inputs(limited), job.command(limited)):
        ending = run_command(command, keep, seconds + STOP_SECONDS)
        if ending.exit_code != 0:
            break
    return ending, list(lines), command


def failure_of(ending: Ending, lines: list[str]) -> Failure:
    """Name the cause of a failure; a process that refused the request printed it."""
    if ending.stopped:
        timed_out = ending.stopped.outcome == "timed_out"
        return replace(ending.stopped, hint=LONGER) if timed_out else ending.stopped
    for index, line in enumerate(lines):
        if ending.exit_code == 2 and line.startswith("error: "):
            reason = next((text.strip()[4:].strip() for text in lines[index:] if text.strip().startswith("why ")), "")
            return Failure(outcome="failed", cause=" ".join(filter(None, (line.removeprefix("error: "), reason))))
    failure = classify(ending.exit_code, lines, ())
    return failure or Failure(outcome="failed", cause=f"It ended with status {ending.exit_code}.")


def failed_run(job: Job, training: Training, failure: Failure, argv: Sequence[str]) -> RunRecord:
    """Return the record of a job that failed before training, or whose engine keeps no records."""
    machine = training.machine or Machine(platform="cpu", accelerator=None, gpus_per_node=training.ranks, nodes=1)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    outcome: Outcome = failure.outcome
    return RunRecord(
        run_id=f"{job.name}-{REFUSED}-{now}",
        model=MODEL,
        strategy=None,
        engine=job.engine,
        workload=Workload(matmul_dtype=job.dtype),
        machine=machine,
        started_at=now,
        ended_at=now,
        clock="framework" if job.engine == "torchtune" else "step_end",
        outcome=outcome,
        cause=failure.cause,
        hint=failure.hint,
        command=tuple(argv),
    )


def results_in(folder: Path) -> list[RunResult]:
    """Read every run of a job; damaged ones are left out, so that they are repeated."""
    return load_results([folder])[0] if folder.is_dir() else []


def newest_result(folder: Path) -> RunResult | None:
    """Return the newest run that counts, else the newest one."""
    return max(results_in(folder), key=lambda result: (result.run.counts, result.run.started_at or ""), default=None)


def log(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)
