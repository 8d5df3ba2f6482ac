"""Hand the runs of a call to SLURM: write a script that makes the same call on the job's nodes, and submit it.

Manuals of sbatch and srun, 22.05 and later.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tprimat.config.schema import SlurmOptions
from tprimat.core.accelerators import PLATFORM_OF
from tprimat.core.errors import ConfigError, LaunchError
from tprimat.engines.base import start_command
from tprimat.hardware.nodes import this_machine
from tprimat.records.lock import holder_of
from tprimat.records.store import write_atomically
from tprimat.runner.request import RunRequest, layout_name
from tprimat.runner.session import Session, prepare

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


def job_of(request: RunRequest, words: Sequence[str]) -> tuple[Job, Session]:
    """Return the job that makes a call, and its session. What its machine would decide otherwise follows the call's own words.

    Raises:
        UserError: the request cannot be met, or says nothing of the machines that it is for.
    """
    machine = this_machine()
    if request.platform is None and machine is None:
        what = "This machine shows no GPU, and no --platform says which GPUs the job gets."
        raise ConfigError(what, where="--platform", fix="--platform nvidia, amd or cpu")
    platform = request.platform or PLATFORM_OF[machine.platform if machine else "cpu"]
    known = replace(request, strategy=None, tp=1) if request.is_auto else request  # the job chooses
    session = prepare(replace(known, platform=platform, dry_run=True))
    options, plan = session.loaded.config.cluster.slurm, session.plans[0]
    explicit = ["--model", request.model, "--platform", platform, "--set", f"size={session.size}", "--nodes", str(plan.nodes)]
    explicit += ["--output-dir", str(session.output)]
    explicit += [] if request.strategy or layout_name(request) else ["--parallel", session.choices.strategy]
    explicit += [] if "--sweep" in words else ["--resume"]  # a sweep continues anyway, and keeps failures
    job = Job(
        name=f"tprimat-{'-'.join(dict.fromkeys(plan.model for plan in session.plans))}"[:60],
        directory=Path.cwd(),
        log=str(session.output).replace("%", "%%") + "/slurm-%j.log",
        nodes=plan.nodes,
        gpus_per_node=None if plan.platform == "cpu" else plan.gpus_per_node,
        options=tuple(sbatch_options(options)),
        command=(*SRUN, *start_command(), *of_the_job(words), *explicit),
    )
    return job, session


def of_the_job(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a call that are for its job."""
    rest = iter(words)
    for word in rest:
        if word == "--launcher":
            next(rest, None)
        elif word != "--dry-run" and not word.startswith("--launcher="):
            yield word


def sbatch_options(options: SlurmOptions) -> Iterator[str]:
    """Yield the configuration's options of sbatch; the user's own come last and win."""
    for name in ("partition", "account", "qos", "constraint", "time"):
        if (value := getattr(options, name)) is not None:
            yield f"--{name}={value}"
    if options.exclusive:
        yield "--exclusive"
    yield from options.arguments


def submit(request: RunRequest, words: Sequence[str]) -> int:
    """Submit a job that makes a call, and wait for its end; Ctrl-C ends the waiting, not the job.

    Returns:
        the exit status: 0 when the job completed, 1 when it did not.

    Raises:
        UserError: the request cannot be met, or there is no SLURM.
    """
    job, session = job_of(request, words)
    path = session.output / "slurm.sh"
    write_atomically(path, script(job), private=True)  # its command may hold what the user gave by --set
    if (holder := holder_of(session.output)) is not None:
        print(
            f"warning: {session.output} is in use by {holder}; the new job fails if that still runs when it starts",
            file=sys.stderr,
        )
    print(f"{path}: its output goes to {job.log.replace('%%', '%')}; scancel ends it", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(["sbatch", "--wait", str(path)], stdout=sys.stderr, check=False)
    except OSError as error:
        fix = "start this on a login node of the cluster"
        raise LaunchError(f"sbatch cannot be started: {error.strerror}.", where="--launcher slurm", fix=fix) from error
    return min(done.returncode, 1)
