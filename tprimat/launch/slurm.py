"""Runs as jobs of SLURM: the script for sbatch (manuals of sbatch and srun, 22.05 and later)."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from tprimat.core.errors import LaunchError

SRUN = ("srun", "--kill-on-bad-exit=1", "--cpu-bind=none")
"""Starts a command once on every node, with all cores of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to submit."""

    name: str
    directory: Path
    """Working directory."""
    log: str
    """File for the output, in which %j is the number of the job."""
    nodes: int
    gpus_per_node: int | None
    """None: no GPUs are asked for."""
    options: tuple[str, ...] = ()
    """More options of sbatch, such as --partition=gpu."""
    command: tuple[str, ...]
    """Starts a launcher on every node."""


def script(job: Job) -> str:
    """Return the script for sbatch. Every word is quoted, so that the shell has nothing to expand."""
    options = [
        f"--job-name={job.name}",
        f"--chdir={job.directory}",
        f"--output={job.log}",
        "--open-mode=append",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([] if job.gpus_per_node is None else [f"--gpus-per-node={job.gpus_per_node}"]),
        "--requeue",
        *job.options,
    ]
    if broken := [option for option in options if not option.isprintable()]:
        raise LaunchError(f"{broken[0]!r} is not an option of sbatch.", why="An option is one line of its script.")
    return "\n".join(
        ["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in options), "", f"exec {shlex.join(job.command)}", ""]
    )
