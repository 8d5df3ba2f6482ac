"""Hand the runs of a call to SLURM: write a script that makes the same call on the job's nodes, and submit it.

Sources: the manuals of sbatch, srun and squeue, 22.05 and later.
"""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

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
FAILED = {"BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
"""States in which a job ends without having done its work."""


def script(options: Sequence[str], command: Sequence[str]) -> str:
    """Return the script for sbatch. Every word is quoted, so that the shell has nothing to expand."""
    if broken := [option for option in options if not option.isprintable()]:
        raise LaunchError(f"{broken[0]!r} is not an option of sbatch.", why="An option is one line of its script.")
    lines = (f"#SBATCH {shlex.quote(option)}" for option in options)
    return "\n".join(["#!/bin/bash", *lines, "", f"exec {shlex.join(command)}", ""])


def job_of(request: RunRequest, words: Sequence[str]) -> tuple[list[str], list[str], Session]:
    """Return sbatch's options, and the command that makes a call on every node, and its session.

    What the job's machine would decide otherwise follows the call's own words.
    """
    machine = this_machine()
    if request.platform is None and machine is None:
        what = "This machine shows no GPU, so --platform must say which GPUs the job gets."
        raise ConfigError(what, where="--platform", fix="--platform nvidia, amd or cpu")
    platform = request.platform or PLATFORM_OF[machine.platform if machine else "cpu"]
    known = replace(request, strategy=None, tp=1) if request.is_auto else request  # the job chooses
    session = prepare(replace(known, platform=platform, dry_run=True))
    wanted, plan = session.loaded.config.cluster.slurm, session.plans[0]
    decided = {"--model": request.model, "--platform": platform, "--nodes": str(plan.nodes), "--output-dir": str(session.output)}
    given = {word.partition("=")[0] for word in words}
    explicit = ["--set", f"size={session.size}"]
    explicit += [word for flag, value in decided.items() if flag not in given for word in (flag, value)]
    explicit += [] if request.strategy or layout_name(request) else ["--parallel", session.choices.strategy]
    explicit += [] if "--sweep" in words else ["--resume"]  # a sweep continues anyway, and keeps failures
    name = f"tprimat-{'-'.join(dict.fromkeys(plan.model for plan in session.plans))}"[:60]
    asked = {one: getattr(wanted, one) for one in ("partition", "account", "qos", "constraint", "time")}
    options = [
        f"--job-name={name}",
        f"--chdir={Path.cwd()}",
        "--output=" + f"{session.output}".replace("%", "%%") + "/slurm-%j.log",
        "--open-mode=append",
        f"--nodes={plan.nodes}",
        "--ntasks-per-node=1",
        *([] if plan.platform == "cpu" else [f"--gpus-per-node={plan.gpus_per_node}"]),
        "--requeue",
        *(f"--{key}={value}" for key, value in asked.items() if value is not None),
        *(["--exclusive"] if wanted.exclusive else []),
        *wanted.arguments,  # the user's own come last and win
    ]
    return options, [*SRUN, *start_command(), *of_the_job(words), *explicit], session


def of_the_job(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a call that are for its job."""
    rest = iter(words)
    for word in rest:
        if word == "--launcher":
            next(rest, None)
        elif word != "--dry-run" and not word.startswith("--launcher="):
            yield word


def submit(request: RunRequest, words: Sequence[str]) -> int:
    """Submit a job that makes a call, and wait for its end; return 0 when it completed. Ctrl-C ends the waiting, not the job.

    sbatch --wait exits with 0, too, where it asks while the processes of a cancelled job are still ending.
    """
    options, command, session = job_of(request, words)
    path = session.output / "slurm.sh"
    write_atomically(path, script(options, command), private=True)  # its command may hold what the user gave by --set
    if (holder := holder_of(session.output)) is not None:
        fails = "the new job fails if that still runs when it starts"
        print(f"warning: {session.output} is in use by {holder}; {fails}", file=sys.stderr)
    print(f"{path}: its output goes to {session.output}/slurm-%j.log; scancel ends it", file=sys.stderr, flush=True)
    job = None
    try:
        with subprocess.Popen(["sbatch", "--wait", path], stdout=subprocess.PIPE, text=True) as sbatch:
            try:
                for line in sbatch.stdout or ():
                    print(line, end="", file=sys.stderr, flush=True)
                    job = re.match(r"Submitted batch job (\d+)", line) or job
            except KeyboardInterrupt:
                sbatch.kill()  # a signal to this process alone does not reach it
                raise
    except OSError as error:
        fix = "start this on a login node of the cluster"
        raise LaunchError(f"sbatch cannot be started: {error.strerror}.", where="--launcher slurm", fix=fix) from error
    return int(sbatch.returncode != 0 or (job is not None and not FAILED.isdisjoint(last_states(job[1]))))


def last_states(job: str) -> list[str]:
    """Return in which states a job ended, one for each task of an array; none where SLURM has forgotten it or does not answer."""
    question = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    for _ in range(600):  # a node may be in COMPLETING until somebody repairs it
        try:
            states = subprocess.run(question, stdout=subprocess.PIPE, text=True, check=False).stdout.split()
        except OSError:
            return []
        if "COMPLETING" not in states:
            break
        time.sleep(1)
    return states
