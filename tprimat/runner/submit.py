"""Hand runs to a scheduler: write its script, submit it, follow the job, and see that every run has an end."""

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from tprimat.config.schema import ContainerOptions, SlurmOptions
from tprimat.core.accelerators import PLATFORM_OF
from tprimat.core.errors import ConfigError
from tprimat.engines.base import ROOT, start_command
from tprimat.hardware.nodes import this_machine
from tprimat.launch import kubernetes, slurm
from tprimat.launch.kubernetes import Workload
from tprimat.launch.process import Interrupts
from tprimat.launch.run import GrowingFile
from tprimat.launch.slurm import FINAL, Job, Task
from tprimat.records.lock import holder_of
from tprimat.records.schema import RunRecord
from tprimat.records.sharing import masked_command
from tprimat.records.store import write_atomically
from tprimat.runner.request import RunRequest, words_of
from tprimat.runner.session import Session, prepare
from tprimat.runner.sweep import end_unfinished

POLL_SECONDS = 2.0
PODS_MEET_SECONDS = 1800
"""Until all pods run: some nodes have the image already, others fetch it."""


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
        strategy=request.strategy if request.strategy or request.any_degree else session.choices.strategy,
        output=session.output,
        dry_run=False,
    )
    return settled, session


def resuming(more: Sequence[str]) -> tuple[str, ...]:
    """Return flags with --resume, by which a job that starts again continues; a sweep does so anyway, and keeps failures."""
    return tuple(more) if "--sweep" in more else ("--resume", *more)


# SLURM.


def slurm_job(request: RunRequest, session: Session, more: Sequence[str]) -> Job:
    """Return the job that starts the runs of a session: one after the other, or as an array where the configuration says so.

    The request says everything that the job's machine would decide otherwise; `more` are flags besides it.
    """
    options, plan = session.loaded.config.cluster.slurm, session.plans[0]
    cells = list(dict.fromkeys((plan.model, plan.strategy) for plan in session.plans))
    is_array = options.array_tasks is not None and len(cells) > 1 and not request.any_degree and not request.is_auto
    if is_array:
        tasks = tuple(("--model", model, "--parallel", strategy) for model, strategy in cells)
        request = dataclasses.replace(request, model=RunRequest().model, strategy=None)
    words = (*program(options.container), *words_of(request), *resuming(more))
    return Job(
        name=f"tprimat-{'-'.join(dict.fromkeys(model for model, _ in cells))}"[:60],
        directory=Path.cwd(),
        log=str(session.output).replace("%", "%%") + ("/slurm-%A_%a.log" if is_array else "/slurm-%j.log"),
        nodes=plan.nodes,
        gpus_per_node=None if plan.platform == "cpu" else plan.gpus_per_node,
        options=tuple(sbatch_options(options)),
        command=(*on_every_node(options.container, session), *words),
        tasks=tasks if is_array else (),
        at_once=options.array_tasks or 1,
    )


def sbatch_options(options: SlurmOptions) -> Iterator[str]:
    """Yield the configuration's options of sbatch; the user's own come last and win."""
    for name in ("partition", "account", "qos", "constraint", "time"):
        if (value := getattr(options, name)) is not None:
            yield f"--{name}={value}"
    if options.exclusive:
        yield "--exclusive"
    yield from options.arguments


def program(container: ContainerOptions) -> tuple[str, ...]:
    """Return the words that start ./benchmark.py in the job: with this Python, or with the container's."""
    python, *words = start_command()
    return ("python3" if container.image else python, *words)


def on_every_node(container: ContainerOptions, session: Session) -> tuple[str, ...]:
    """Return the words that start a command on every node, in a container where one is requested."""
    if container.image is None:
        return slurm.SRUN
    folders = dict.fromkeys([str(ROOT), str(session.output), str(Path.cwd())])
    mounts = [*(f"{folder}:{folder}" for folder in folders), *container.mounts]
    if container.runtime == "pyxis":
        pyxis = (
            f"--container-image={container.image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={Path.cwd()}",
        )
        return (*slurm.SRUN, *pyxis)
    devices = {"nvidia": ("--nv",), "amd": ("--rocm",)}.get(session.platform, ())
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return (*slurm.SRUN, "apptainer", "exec", *devices, *binds, "--pwd", str(Path.cwd()), container.image)


def submit_to_slurm(request: RunRequest, more: Sequence[str], messages: TextIO) -> int:
    """Submit a job that starts the runs of a request, and follow it to its end; Ctrl-C cancels it.

    Returns:
        the exit status: 0 when the job completed, 1 when it did not.

    Raises:
        UserError: the request cannot be met, or SLURM refuses the job.
    """
    request, session = explicit(request, more)
    job = slurm_job(request, session, more)
    path = session.output / "slurm.sh"
    write_atomically(path, slurm.script(job), private=True)  # its command may hold what the user gave by --set

    def say(text: str) -> None:
        print(text, file=messages, flush=True)

    if (holder := holder_of(session.output)) is not None:
        say(f"warning: {session.output} is in use by {holder}; the new job fails if that still runs when it starts")
    with Interrupts():  # Ctrl-C while sbatch runs cancels the job, too
        number = slurm.submit(path)
        say(f"job {number} submitted: {path}")
        tasks = follow_job(number, job, say)
    close_runs(session.output, number, tasks)
    for task in tasks:
        if (failure := FINAL.get(task.state)) is not None:
            reason = f" ({task.reason})" if task.reason and task.reason != "NonZeroExitCode" else ""
            hint = slurm.STUCK.get(task.reason or "", failure.hint)
            say(f"job {task.name}: {task.state}{reason}. {failure.cause}" + (f" Try: {hint}" if hint else ""))
    return 0 if tasks and all(FINAL.get(task.state, task) is None for task in tasks) else 1


def follow_job(number: str, job: Job, say: Callable[[str], None]) -> list[Task]:
    """Follow a job to its end, and return its tasks as they ended. SIGINT and SIGTERM cancel it; a hang-up leaves it alone."""
    log = None if job.tasks else GrowingFile(Path(job.log.replace("%%", "%").replace("%j", number)))
    known: dict[str, tuple[str, str | None]] = {}
    cancelled = False
    with Interrupts() as interrupts:
        while True:
            tasks = slurm.tasks_of(number)
            for task in tasks:
                if known.get(task.name) != (task.state, task.reason):
                    known[task.name] = (task.state, task.reason)
                    say(f"job {task.name}: {state_line(task)}")
            if log is not None:
                while lines := log.new_lines():
                    say("\n".join(line.decode("utf8", errors="replace") for line in lines))
            if not tasks or all(task.ended for task in tasks):
                return tasks
            if interrupts.first is signal.SIGHUP:
                return tasks
            if interrupts.count and not cancelled:
                cancelled = True
                say(f"job {number}: cancelling it")
                slurm.cancel(number)
            ends = time.monotonic() + POLL_SECONDS
            while time.monotonic() < ends and (cancelled or not interrupts.count):
                time.sleep(0.1)


def state_line(task: Task) -> str:
    """Return the state of a task in words."""
    where = f" on {task.nodes}" if task.nodes else ""
    why = f" ({task.reason})" if task.reason else ""
    if task.state == "PENDING" and (fix := slurm.STUCK.get(task.reason or "")):
        why += f", and stays so: {fix}"
    return f"{task.state.lower().replace('_', ' ')}{where}{why}"


def close_runs(output: Path, number: str, tasks: Sequence[Task]) -> None:
    """Record an end for the runs of a job whose launchers were ended before they could: what SLURM says of the job."""
    failures = {task.name: FINAL.get(task.state) for task in tasks}
    end_unfinished(output.glob("**/runs/*/run.json"), lambda record: failures.get(job_number(record, number)))


def job_number(record: RunRecord, number: str) -> str:
    """Return the task of a job that a run belongs to; empty where it belongs to another."""
    scheduler, _, name = (record.job or "").partition(" ")
    return name if scheduler == "slurm" and name.partition("_")[0] == number else ""


# Kubernetes.


def workload(request: RunRequest, session: Session, more: Sequence[str]) -> Workload:
    """Return the workload that starts the runs of a session, one after the other.

    Raises:
        ConfigError: no image is named.
    """
    options, plan = session.loaded.config.cluster.kubernetes, session.plans[0]
    if options.image is None:
        where = session.loaded.where("cluster", "kubernetes", "image")
        why = "A pod runs in an image, which has TPrimat and its packages."
        raise ConfigError(
            "cluster.kubernetes.image is not set.", where=where, why=why, fix="--set cluster.kubernetes.image=IMAGE"
        )
    name = f"tprimat-{plan.run_id[:15]}"
    inside = dataclasses.replace(request, output=Path(kubernetes.RESULTS) / name)
    patience = ("--set", f"benchmarking.meeting_timeout_seconds={PODS_MEET_SECONDS}") if plan.nodes > 1 else ()
    return Workload(
        name=name,
        namespace=options.namespace,
        image=options.image,
        nodes=plan.nodes,
        gpus_per_node=plan.gpus_per_node,
        gpu_resource=kubernetes.RESOURCES.get(plan.platform),
        runtime=options.runtime,
        claim=options.volume_claim,
        command=("python3", "-m", "tprimat", "run", *words_of(inside), *patience, *resuming(more)),
    )


def submit_to_kubernetes(request: RunRequest, more: Sequence[str], messages: TextIO) -> int:
    """Create the objects that start the runs of a request, and say how to follow them.

    Raises:
        UserError: the request cannot be met, or kubectl refuses.
    """
    request, session = explicit(request, more)
    options, work = session.loaded.config.cluster.kubernetes, workload(request, session, more)
    print(kubernetes.create(kubernetes.manifest(work, options.kind)), file=messages)
    label = "jobset.sigs.k8s.io/jobset-name" if options.kind == "trainjob" else "batch.kubernetes.io/job-name"
    print(f"follow it:  kubectl logs --namespace {work.namespace} --follow --selector {label}={work.name}", file=messages)
    print(f"results:    {kubernetes.RESULTS}/{work.name} on the volume {work.claim}", file=messages)
    return 0


def shown(request: RunRequest, more: Sequence[str], launcher: str = "slurm") -> str:
    """Return the script or the manifest that would be submitted, for --dry-run.

    Raises:
        UserError: the request cannot be met.
    """
    request, session = explicit(request, more)
    if launcher == "slurm":
        job = slurm_job(request, session, more)
        return slurm.script(dataclasses.replace(job, command=masked_command(job.command)))
    work = workload(request, session, more)
    masked = dataclasses.replace(work, command=masked_command(work.command))
    return kubernetes.manifest(masked, session.loaded.config.cluster.kubernetes.kind)
