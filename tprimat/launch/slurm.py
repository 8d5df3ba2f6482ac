"""Runs as jobs of SLURM: the script for sbatch, and what became of a job.

Sources: the manuals of sbatch, srun, squeue, sacct and scancel (22.05 and later).
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tprimat.core.errors import LaunchError
from tprimat.launch.command import answer_of
from tprimat.records.schema import Failure

SRUN = ("srun", "--kill-on-bad-exit=1", "--cpu-bind=none")
"""Starts a command once on every node, with all cores of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to submit."""

    name: str
    directory: Path
    """Working directory."""
    log: str
    """File for the output, in which %j is the number of the job, and %A and %a those of an array and its task."""
    nodes: int
    gpus_per_node: int | None
    """None: no GPUs are asked for."""
    options: tuple[str, ...] = ()
    """More options of sbatch, such as --partition=gpu."""
    command: tuple[str, ...]
    """Starts a launcher on every node."""
    tasks: tuple[tuple[str, ...], ...] = ()
    """For an array job: what each task adds to the command."""
    at_once: int = 1
    """Tasks of an array that may run at the same time."""


def script(job: Job) -> str:
    """Return the script for sbatch. Every word is quoted, and the shell has nothing to expand but the number of the task."""
    options = [
        f"--job-name={job.name}",
        f"--chdir={job.directory}",
        f"--output={job.log}",
        "--open-mode=append",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([] if job.gpus_per_node is None else [f"--gpus-per-node={job.gpus_per_node}"]),
        "--requeue",
        *([f"--array=0-{len(job.tasks) - 1}%{job.at_once}"] if job.tasks else []),
        *job.options,
    ]
    if broken := [option for option in options if not option.isprintable()]:
        raise LaunchError(f"{broken[0]!r} is not an option of sbatch.", why="An option is one line of its script.")
    lines = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in options), ""]
    words = shlex.join(job.command)
    if not job.tasks:
        return "\n".join([*lines, f"exec {words}", ""])
    cases = [f"{number}) set -- {shlex.join(task)} ;;" for number, task in enumerate(job.tasks)]
    return "\n".join([*lines, 'case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac", f'exec {words} "$@"', ""])


def submit(path: Path) -> str:
    """Submit a script, and return the number of the job.

    Raises:
        LaunchError: there is no sbatch, or it refuses.
    """
    number = ask("sbatch", "--parsable", str(path)).strip().partition(";")[0]
    if not number.isdigit():
        raise LaunchError(f"sbatch answered {number!r} instead of the number of a job.")
    return number


def cancel(number: str) -> None:
    """End a job and all its tasks.

    Raises:
        LaunchError: scancel fails.
    """
    ask("scancel", number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job, or one task of an array, as SLURM sees it now."""

    name: str
    """Such as 4711, or 4711_3."""
    state: str
    """Such as PENDING, in capitals."""
    reason: str | None = None
    """Why it waits or ended so."""
    nodes: str | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in FINAL


FINAL: dict[str, Failure | None] = {
    "COMPLETED": None,
    "FAILED": Failure(outcome="failed", cause="The job failed.", hint="its log has the reason"),
    "TIMEOUT": Failure(
        outcome="timed_out",
        cause="SLURM ended the job at its time limit.",
        hint="ask for more time, or fewer steps",
        cut_off=True,
    ),
    "DEADLINE": Failure(
        outcome="timed_out", cause="SLURM ended the job at its deadline.", hint="a later --deadline, or fewer steps", cut_off=True
    ),
    "NODE_FAIL": Failure(
        outcome="failed", cause="A node of the job failed.", hint="the same call runs what is missing", cut_off=True
    ),
    "BOOT_FAIL": Failure(
        outcome="failed", cause="A node of the job did not start.", hint="the same call runs what is missing", cut_off=True
    ),
    "OUT_OF_MEMORY": Failure(
        outcome="out_of_memory",
        cause="SLURM ended the job because it exceeded its main memory.",
        hint="--mem=0 among cluster.slurm.arguments gives a job all of a node's",
    ),
    "PREEMPTED": Failure(outcome="interrupted", cause="A job of higher priority took its nodes.", hint="the same call continues"),
    "CANCELLED": Failure(outcome="interrupted", cause="The job was cancelled.", hint="the same call continues"),
    "REVOKED": Failure(outcome="interrupted", cause="Another cluster runs the job.", hint=None),
}
"""States in which a job stays -> what they mean for a run that did not record its own end."""


STUCK = {
    "PartitionNodeLimit": "fewer --nodes, or another cluster.slurm.partition",
    "PartitionTimeLimit": "a shorter cluster.slurm.time, or another cluster.slurm.partition",
    "BadConstraints": "another cluster.slurm.constraint",
}
"""Reason for which SLURM lets a job wait forever -> the way out."""


def tasks_of(number: str) -> list[Task]:
    """Return the tasks of a job, or the job itself; empty where SLURM no longer knows it.

    Raises:
        LaunchError: SLURM does not answer.
    """
    try:
        text = ask("squeue", "--noheader", "--array", "--states=all", f"--jobs={number}", "--format=%i|%T|%r|%N")
    except UnknownJobError:
        text = ask(
            "sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={number}", "--format=JobID,State,Reason,NodeList"
        )
    found = [line.split("|") for line in text.splitlines() if line.count("|") >= 3]
    return [
        Task(name=name, state=state.split()[0], reason=None if reason in {"None", ""} else reason, nodes=nodes or None)
        for name, state, reason, nodes, *_ in found
    ]


class UnknownJobError(LaunchError):
    """SLURM has forgotten a job."""


def ask(*command: str) -> str:
    """Return what a program of SLURM prints.

    Raises:
        UnknownJobError: there is no such job any more.
        LaunchError: there is no such program, it fails, or it does not answer.
    """
    done = answer_of(command, where="--launcher slurm", fix="start this on a login node of the cluster", own_session=True)
    if done.returncode == 0:
        return done.stdout
    text = "; ".join(re.sub(r"^\w+: error: ", "", line) for line in done.stderr.splitlines() if line.strip())
    if "Invalid job id" in text:
        raise UnknownJobError(f"SLURM does not know the job: {text}")
    raise LaunchError(
        f"{command[0]} failed: {text or f'exit status {done.returncode}'}.",
        where=shlex.join(command),
        fix="start this where `sinfo` answers; cluster.slurm in config.yaml names partition, account and time",
    )
