"""Training of Qwen3 8B for the accelerator suite: in full on the embedded engine, in full and by LoRA through torchtune.

Each job has a folder of its own under OUTPUT/qwen3-8b. One with a run that counts is not done again; one that fails leaves a
record of its cause, and the next one starts.
"""

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.analyze.roofline import under_ceiling
from tprimat.cli import qwen3, torchtune
from tprimat.cli.qwen3 import MODEL, Training
from tprimat.engines.base import Command
from tprimat.errors import LaunchError
from tprimat.launch.process import Ending
from tprimat.logs.failures import Failure, classify
from tprimat.records.discover import probes_in
from tprimat.records.schema import Machine, Outcome, RunRecord
from tprimat.records.store import RunDirectory
from tprimat.runner.ranks import MOST_SECONDS, supervise

if TYPE_CHECKING:
    from tprimat.records.benchmark_file import RunResult

NAMES = (*(f"embedded-full-{precision}" for precision in qwen3.PRECISIONS), *(f"torchtune-{mode}" for mode in torchtune.MODES))
"""Of all jobs."""
KEPT_LINES = 2000
"""Of a job's output, to find out what it died of."""
TO_STOP_ITSELF = 60
"""Seconds past the limit that an engine with a record of its own has to stop and write it."""
LONGER = f"raise {qwen3.LIMIT_FLAG}, or lower --train-steps"
REFUSED = "refused"
"""The run folder of a job that left no record itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run."""

    name: str
    """Engine, method and dtype: 'embedded-full-bf16'."""
    engine: str
    dtype: str
    command: Callable[[Training], Command]
    before: Callable[[Training], Sequence[Command]] = lambda _: ()
    """Processes that make what the command reads; each must end well."""
    read: Callable[[], str | None] = lambda: None
    """Makes a record of what the process left. Returns: why there is none."""


def jobs_of(output: Path, training: Training, checkpoint: str | None, left_out: set[str]) -> list[Job]:
    """What can run here and was not left out, by its own name or by its stage's, the embedded engine first."""
    return [job for job in possible_jobs(output, training, checkpoint, left_out) if job.name not in left_out]


def possible_jobs(output: Path, training: Training, checkpoint: str | None, left_out: set[str]) -> list[Job]:
    """Those of the stages that were not left out."""
    jobs = []
    for precision in () if "qwen3" in left_out else qwen3.PRECISIONS:
        name = f"embedded-full-{precision}"
        command = partial(qwen3.command_of, precision, folder_of(output, name))
        jobs.append(Job(name=name, engine="megatron", dtype=precision, command=command))
    machine = training.machine
    if "torchtune" in left_out or checkpoint is None or machine is None or torchtune.why_not(checkpoint):
        return jobs
    inputs = torchtune.inputs_of(output, checkpoint)
    for mode in torchtune.MODES:
        folder = folder_of(output, f"torchtune-{mode}")
        jobs.append(
            Job(
                name=folder.name,
                engine="torchtune",
                dtype=mode.partition("-")[2],
                command=partial(torchtune.command_of, mode, folder, inputs),
                before=partial(torchtune.preparations, inputs),
                read=partial(torchtune.read_log, folder, training.ranks, machine.accelerator),
            )
        )
    return jobs


def folder_of(output: Path, name: str) -> Path:
    """Where a job's files go."""
    return output / MODEL / name


def carry_out(job: Job, output: Path, training: Training, tell: Callable[[str], None]) -> bool:
    """Run a job that has no run that counts; whatever becomes of it is a record.

    Returns:
        False: the user stopped it.
    """
    folder = folder_of(output, job.name)
    done = newest(folder)
    if done is not None and done.run.counts:
        tell(f"{job.name}: done before.")
        return True
    refusal = RunDirectory(folder / "runs" / REFUSED)
    with contextlib.suppress(FileNotFoundError):
        refusal.run_file.unlink()
    before = {result.run.run_id for result in results_in(folder)}
    lines: deque[str] = deque(maxlen=KEPT_LINES)

    def hear(line: str) -> None:
        lines.append(line)
        tell(line)

    seconds = MOST_SECONDS if training.seconds is None else training.seconds
    limited = replace(training, seconds=seconds)
    for command in (*job.before(limited), job.command(limited)):
        ending = supervise(command, hear, seconds + TO_STOP_ITSELF)
        if ending.exit_code != 0:
            break
    found = None if ending.exit_code == 0 else why(ending, list(lines))
    if found is None and (unread := job.read()):
        found = Failure(outcome="failed", cause=unread)
    recorded = [result.run for result in results_in(folder) if result.run.run_id not in before]
    if found and not recorded:
        refusal.write_run(refused(job, training, found, command.argv))
    cause = next((run.cause for run in recorded if run.cause), None)
    tell(f"{job.name}: {cause or (found.cause if found else 'completed')}")
    return ending.stopped is None or ending.stopped.outcome != "interrupted"


def why(ending: Ending, lines: list[str]) -> Failure:
    """What a process died of; one that refused what was asked said so itself."""
    if ending.stopped:
        cut = ending.stopped.outcome == "timed_out"
        return replace(ending.stopped, hint=LONGER) if cut else ending.stopped
    for index, line in enumerate(lines):
        if ending.exit_code == 2 and line.startswith("error: "):
            reason = next((text.strip()[4:].strip() for text in lines[index:] if text.strip().startswith("why ")), "")
            return Failure(outcome="failed", cause=" ".join(filter(None, (line.removeprefix("error: "), reason))))
    found = classify(ending.exit_code, lines, ())
    return found or Failure(outcome="failed", cause=f"It ended with status {ending.exit_code}.")


def refused(job: Job, training: Training, failure: Failure, argv: Sequence[str]) -> RunRecord:
    """The record of a job that did not come to train, or whose engine keeps no records."""
    machine = training.machine or Machine(platform="cpu", accelerator=None, gpus_per_node=training.ranks, nodes=1)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    outcome: Outcome = failure.outcome
    return RunRecord(
        run_id=f"{job.name}-{REFUSED}-{now}",
        model=MODEL,
        strategy=None,
        engine=job.engine,
        matmul_dtype=job.dtype,
        tensor_parallel=None,
        pipeline_parallel=None,
        data_parallel=None,
        micro_batch_sequences=None,
        global_batch_sequences=None,
        sequence_tokens=None,
        machine=machine,
        started_at=now,
        ended_at=now,
        clock="framework" if job.engine == "torchtune" else "step_end",
        outcome=outcome,
        cause=failure.cause,
        hint=failure.hint,
        command=tuple(argv),
    )


def results_in(folder: Path) -> "list[RunResult]":
    """Every run of a job; a damaged one is done again."""
    from tprimat.records.discover import load_results

    return load_results([folder])[0] if folder.is_dir() else []


def newest(folder: Path) -> "RunResult | None":
    """The newest run that counts, else the newest one."""
    results = results_in(folder)
    return max(results, key=lambda result: (result.run.counts, result.run.started_at or ""), default=None)


def has_records(output: Path) -> bool:
    """Whether any job has left one."""
    kinds = ("*/runs/*/run.json", f"*/{torchtune.RESULT}")
    return any(True for kind in kinds for _ in (output / MODEL).glob(kind))


def section(output: Path, reason: str | None = None) -> str:
    """The page's section, from records alone.

    Args:
        output: of the suite.
        reason: why torchtune cannot run, where that was found out just now; left out once there are runs of torchtune.
    """
    from tprimat.analyze.groups import measure
    from tprimat.analyze.metrics import MetricOptions
    from tprimat.report.finetune import finetune_section

    folders = sorted(path for path in (output / MODEL).glob("*") if path.is_dir())
    probes, _ = probes_in([output])
    found = {folder.name: result for folder in folders if (result := newest(folder)) is not None}
    options = {name: under_ceiling(MetricOptions(), result.run, probes) for name, result in found.items()}
    return finetune_section({name: measure(result, options[name]) for name, result in found.items()}, reason)


def tell(line: str) -> None:
    """Progress, beside the results."""
    print(line, file=sys.stderr, flush=True)


def run(jobs: Sequence[Job], output: Path, training: Training, ends: float | None) -> bool:
    """All jobs in order, as far as the time suffices. False: the user stopped it.

    Args:
        jobs: what to do.
        output: of the suite.
        training: on what.
        ends: on time.monotonic; no job begins after it, and one under way is stopped a minute later.
    """
    for job in jobs:
        left = None if ends is None else ends - time.monotonic()
        if left is not None and left <= 0:
            tell(f"{job.name} is left out: the time budget is spent.")
            continue
        tell(f"{job.name}:")
        try:
            if not carry_out(job, output, replace(training, seconds=left), tell):
                return False
        except LaunchError as error:
            tell(f"{job.name}: {error}")
    return True
