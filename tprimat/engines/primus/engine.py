"""Primus, AMD's training framework over Megatron: an experiment file of our own, and the launcher that starts it.

Sources: runner/primus-cli*.sh and examples/run_pretrain.sh of AMD-AGI/Primus, v0.2.0 to v26.5.1.
"""

from collections.abc import Mapping
from pathlib import PurePath

from tprimat.engines.base import Command
from tprimat.engines.primus.settings import SAFE, experiment_text, overrides
from tprimat.errors import LaunchError
from tprimat.logs.fields import LineFields
from tprimat.logs.formats import primus as dialect
from tprimat.plan.schema import PrimusStart, RunPlan

MASTER_PORT = "29500"
"""torch.distributed's own. Primus's is 1234, below the ports that are free for everyone."""


class PrimusEngine:
    """Starts Primus and reads its console."""

    name = "primus"

    def command(self, plan: RunPlan) -> Command:
        """The launcher with the generated experiment and every setting of the plan.

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
        """What a line of the console says."""
        return dialect.read_line(text)


def _environment(plan: RunPlan, start: PrimusStart) -> dict[str, str]:
    """Everything that Primus would otherwise take from the surroundings, such as a SLURM job of which this is a part."""
    found = {"PRIMUS_EXP_NAME": plan.run_id, "GPUS_PER_NODE": str(plan.gpus_per_node), "MASTER_PORT": MASTER_PORT}
    if start.launcher != "slurm":
        found |= {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "localhost"}
    return found


def _launcher(plan: RunPlan, start: PrimusStart, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The words before '-- train pretrain'. Under slurm the mode of the nodes follows srun's own words."""
    if start.launcher == "direct":
        return ("direct", "--log_file", own_log(plan))
    if start.launcher == "container":
        return ("container", *_container(plan, start, environment))
    srun = ("slurm", "srun", "-N", str(plan.nodes), *start.slurm_arguments, "--")
    # Primus's entry on the nodes adds the rendezvous; the number of GPUs it takes from srun's environment.
    passed_on = {name: value for name, value in environment.items() if name not in {"GPUS_PER_NODE", "MASTER_PORT"}}
    # v0.7.0 to v26.4.0 know no mode here and always start a container, which later ones do without a mode.
    return (*srun, *_container(plan, start, passed_on)) if start.image else (*srun, "direct")


def _container(plan: RunPlan, start: PrimusStart, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The output folder at its own place inside, and the environment. Primus mounts its checkout and the GPUs itself.

    --init puts a process that hears SIGTERM first: the shell that Primus starts there would not, and a run that is stopped would
    go on in its container.
    """
    image = ("--image", start.image) if start.image else ()
    volume = ("--volume", f"{plan.output_directory}:{plan.output_directory}")
    return ("--init", *image, *volume, *(word for name, value in environment.items() for word in ("--env", f"{name}={value}")))


def own_log(plan: RunPlan) -> str:
    """Where Primus's launcher keeps its copy of the console; its default is shared by all runs."""
    return str(PurePath(plan.run_directory) / "primus.log")


def refuse_unsafe(plan: RunPlan, start: PrimusStart) -> None:
    """Primus's launchers split and evaluate their words once more.

    Raises:
        LaunchError: a path holds what that would break.
    """
    for name, path in (("output folder", plan.run_directory), ("Primus checkout", start.directory or "")):
        if path and not SAFE.fullmatch(path):
            why = "Primus's launchers pass it through a shell without quotes."
            raise LaunchError(f"The {name} {path!r} holds a space or a sign.", why=why, fix="a path of letters, digits and ._-/")


ENGINE = PrimusEngine()
