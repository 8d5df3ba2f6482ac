"""Hand runs to SLURM: write a script, and submit it."""

import dataclasses
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from tprimat.config.schema import ContainerOptions, SlurmOptions
from tprimat.core.accelerators import PLATFORM_OF
from tprimat.core.errors import ConfigError, LaunchError
from tprimat.engines.base import ROOT, start_command
from tprimat.hardware.nodes import this_machine
from tprimat.launch import slurm
from tprimat.launch.slurm import Job
from tprimat.records.lock import holder_of
from tprimat.records.sharing import masked_command
from tprimat.records.store import write_atomically
from tprimat.runner.request import RunRequest, layout_name, words_of
from tprimat.runner.session import Session, prepare


def explicit(request: RunRequest, more: Sequence[str]) -> tuple[RunRequest, Session]:
    """Return the request with what another machine would decide otherwise, and its session.

    `more` are flags besides it. With --scaling among them the session is that of the largest number of GPUs.

    Raises:
        UserError: the request cannot be met, or says nothing of the machines that it is for.
    """
    machine = this_machine()
    if request.platform is None and machine is None:
        what = "This machine shows no GPU, and no --platform says which GPUs the job gets."
        raise ConfigError(what, where="--platform", fix="--platform nvidia, amd or cpu")
    platform = request.platform or PLATFORM_OF[machine.platform if machine else "cpu"]
    known = dataclasses.replace(request, strategy=None, tp=1) if request.is_auto else request  # the job chooses
    session = prepare(dataclasses.replace(known, platform=platform, dry_run=True))
    plan = session.plans[0]
    settled = dataclasses.replace(
        request,
        platform=platform,
        size=session.size,
        nodes=plan.nodes,
        gpus=None if "--scaling" in more else request.gpus,
        strategy=request.strategy or (None if layout_name(request) else session.choices.strategy),
        output=session.output,
        dry_run=False,
    )
    return settled, session


def resuming(more: Sequence[str]) -> tuple[str, ...]:
    """Return flags with --resume, by which a job that starts again continues; a sweep does so anyway, and keeps failures."""
    return tuple(more) if "--sweep" in more else ("--resume", *more)


def slurm_job(request: RunRequest, session: Session, more: Sequence[str]) -> Job:
    """Return the job that starts the runs of a session, one after the other; `more` are flags besides the request."""
    options, plan = session.loaded.config.cluster.slurm, session.plans[0]
    python, *words = start_command()
    program = ("python3" if options.container.image else python, *words)
    command = (*program, *words_of(request), *resuming(more))
    models = dict.fromkeys(plan.model for plan in session.plans)
    return Job(
        name=f"tprimat-{'-'.join(models)}"[:60],
        directory=Path.cwd(),
        log=str(session.output).replace("%", "%%") + "/slurm-%j.log",
        nodes=plan.nodes,
        gpus_per_node=None if plan.platform == "cpu" else plan.gpus_per_node,
        options=tuple(sbatch_options(options)),
        command=(*on_every_node(options.container, session), *command),
    )


def sbatch_options(options: SlurmOptions) -> Iterator[str]:
    """Yield the configuration's options of sbatch; the user's own come last and win."""
    for name in ("partition", "account", "qos", "constraint", "time"):
        if (value := getattr(options, name)) is not None:
            yield f"--{name}={value}"
    if options.exclusive:
        yield "--exclusive"
    yield from options.arguments


def on_every_node(container: ContainerOptions, session: Session) -> tuple[str, ...]:
    """Return the words that start a command on every node, in a container where one is requested."""
    if container.image is None:
        return slurm.SRUN
    folder = str(Path.cwd())
    folders = dict.fromkeys([str(ROOT), str(session.output), folder])
    mounts = [*(f"{folder}:{folder}" for folder in folders), *container.mounts]
    if container.runtime == "pyxis":
        pyxis = (f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}")
        return (*slurm.SRUN, *pyxis, f"--container-workdir={folder}")
    devices = {"nvidia": ("--nv",), "amd": ("--rocm",)}.get(session.platform, ())
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return (*slurm.SRUN, "apptainer", "exec", *devices, *binds, "--pwd", folder, container.image)


def submit(request: RunRequest, more: Sequence[str], messages: TextIO) -> int:
    """Submit a job that starts the runs of a request, and wait for its end; Ctrl-C ends the waiting, not the job.

    Returns:
        the exit status: 0 when the job completed, 1 when it did not.

    Raises:
        UserError: the request cannot be met, or SLURM refuses the job.
    """
    request, session = explicit(request, more)
    job, path = slurm_job(request, session, more), session.output / "slurm.sh"
    write_atomically(path, slurm.script(job), private=True)  # its command may hold what the user gave by --set
    if (holder := holder_of(session.output)) is not None:
        warning = f"warning: {session.output} is in use by {holder}; the new job fails if that still runs when it starts"
        print(warning, file=messages, flush=True)
    print(f"{path}: its output goes to {job.log.replace('%%', '%')}; scancel ends it", file=messages, flush=True)
    try:
        done = subprocess.run(["sbatch", "--wait", str(path)], stdout=messages, stderr=messages, check=False)
    except OSError as error:
        fix = "start this on a login node of the cluster"
        raise LaunchError(f"sbatch cannot be started: {error.strerror}.", where="--launcher slurm", fix=fix) from error
    return min(done.returncode, 1)


def shown(request: RunRequest, more: Sequence[str]) -> str:
    """Return the script that would be submitted, for --dry-run.

    Raises:
        UserError: the request cannot be met.
    """
    request, session = explicit(request, more)
    job = slurm_job(request, session, more)
    return slurm.script(dataclasses.replace(job, command=masked_command(job.command)))
