"""Primus, AMD's training framework over Megatron: a generated experiment file and the launcher that starts it.

Sources: runner/primus-cli*.sh and examples/run_pretrain.sh of AMD-AGI/Primus, v0.2.0 to v26.5.1.
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import ClassVar

from tprimat.engines.base import Availability, Command, Engine, Here, Where, refuse_bf16_states
from tprimat.engines.primus.install import find_installation, find_primus
from tprimat.engines.primus.settings import SAFE, experiment_text, overrides, rank_error_logs
from tprimat.errors import LaunchError, UserError
from tprimat.logs.fields import LineFields
from tprimat.logs.formats import primus as log_format
from tprimat.plan.schema import PlatformName, PrimusStart, RunPlan

MASTER_PORT = "29500"
"""torch.distributed's own. Primus's is 1234, below the ports that are free for everyone."""


class PrimusEngine(Engine):
    """Starts Primus and reads its console."""

    name: ClassVar[str] = "primus"
    automatic_on: ClassVar[PlatformName | None] = "amd"

    def available(self, here: Here) -> Availability:
        """Look for the user's checkout, or for primus-cli on PATH."""
        path = here.primus_path
        if (found := find_primus(path)) is not None:
            return Availability(reason=f"Primus is at {found}")
        what = f"There is no folder {path} (PRIMUS_PATH)." if path else "Primus was not found."
        fix = "export PRIMUS_PATH=/path/to/Primus, or put primus-cli on PATH; or --engine megatron"
        error = LaunchError(what, why="The engine primus starts AMD's Primus.", fix=fix)
        return Availability(reason="Primus was not found", error=error)

    def refusal(self, plan: RunPlan, where: Where) -> UserError | None:
        """Refuse what has no counterpart in Primus, and keys that contradict the plan."""
        if refused := refuse_bf16_states(self.name, plan, where):
            return refused
        try:
            self.command(plan)
        except UserError as error:
            return error
        return None

    def prepare(self, here: Here) -> PrimusStart:
        """Find out which Primus is installed and how to start it."""
        return find_installation(here.primus, here.primus_path, here.nodes)

    def software(self, plan: RunPlan) -> dict[str, str]:
        """Return the version of the checkout."""
        return {self.name: plan.primus.version} if plan.primus and plan.primus.version else {}

    def error_logs(self, plan: RunPlan) -> tuple[str, ...]:
        """Return the pattern of the ranks' own error logs: primus-cli hides most ranks' output from the console."""
        return (rank_error_logs(plan),)

    def command(self, plan: RunPlan) -> Command:
        """Return the launcher with the generated experiment and every setting of the plan.

        Raises:
            LaunchError: the plan has no Primus to start, or asks for what Primus cannot do.
            ConfigError: an additional key contradicts the plan.
        """
        start = plan.primus
        if start is None:
            raise LaunchError("The plan does not say which Primus to start.", fix="plan again with --engine primus")
        refuse_unsafe(plan, start)
        experiment = str(PurePath(plan.run_directory) / "primus.yaml")
        environment = {**plan.environment, **_environment(plan, start)}
        if start.launcher == "script":
            environment["EXP"] = experiment
            environment["TRAIN_LOG"] = own_log(plan)
            argv: tuple[str, ...] = ("bash", start.program, *overrides(plan))
        else:
            training = ("train", "pretrain", "--config", experiment, *overrides(plan))
            argv = (start.program, *_launcher(plan, start, environment), "--", *training)
        return Command(argv=argv, environment=environment, directory=start.directory, files={experiment: experiment_text(plan)})

    def read_line(self, text: str) -> LineFields | None:
        """Parse one line of the console."""
        return log_format.read_line(text)


def _environment(plan: RunPlan, start: PrimusStart) -> dict[str, str]:
    """Set what Primus would otherwise take from its surroundings, such as an enclosing SLURM job."""
    found = {"PRIMUS_EXP_NAME": plan.run_id, "GPUS_PER_NODE": str(plan.gpus_per_node), "MASTER_PORT": MASTER_PORT}
    if start.launcher != "slurm":
        found |= {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "localhost"}
    return found


def _launcher(plan: RunPlan, start: PrimusStart, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words before '-- train pretrain'. Under slurm the nodes' mode follows srun's own words."""
    if start.launcher == "direct":
        return ("direct", "--log_file", own_log(plan))
    if start.launcher == "container":
        return ("container", *_container(plan, start, environment))
    srun = ("slurm", "srun", "-N", str(plan.nodes), *start.slurm_arguments, "--")
    # Primus's entry script on the nodes adds the rendezvous and reads the number of GPUs from srun's environment.
    passed_on = {name: value for name, value in environment.items() if name not in {"GPUS_PER_NODE", "MASTER_PORT"}}
    # v0.7.0 to v26.4.0 take no mode here and always start a container; later versions do so when no mode is given.
    return (*srun, *_container(plan, start, passed_on)) if start.image else (*srun, "direct")


def _container(plan: RunPlan, start: PrimusStart, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Mount the output folder at the same path and pass the environment. Primus mounts its checkout and the GPUs itself.

    --init makes a process that handles SIGTERM the container's first: the shell that Primus starts ignores it, so a stopped run
    would continue inside its container.
    """
    image = ("--image", start.image) if start.image else ()
    volume = ("--volume", f"{plan.output_directory}:{plan.output_directory}")
    return ("--init", *image, *volume, *(word for name, value in environment.items() for word in ("--env", f"{name}={value}")))


def own_log(plan: RunPlan) -> str:
    """Return the path for the launcher's copy of the console; the default path is shared by all runs."""
    return str(PurePath(plan.run_directory) / "primus.log")


def refuse_unsafe(plan: RunPlan, start: PrimusStart) -> None:
    """Refuse paths that Primus's launchers, which evaluate their arguments a second time, would break.

    Raises:
        LaunchError: a path with a space or a special character.
    """
    for name, path in (("output folder", plan.run_directory), ("Primus checkout", start.directory or "")):
        if path and not SAFE.fullmatch(path):
            why = "Primus's launchers pass it through a shell without quotes."
            raise LaunchError(f"The {name} {path!r} holds a space or a sign.", why=why, fix="a path of letters, digits and ._-/")


ENGINE = PrimusEngine()
