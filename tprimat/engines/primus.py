"""Primus, AMD's training framework over Megatron: a generated experiment file and the launcher that starts it.

Sources: runner/primus-cli*.sh and examples/run_pretrain.sh of AMD-AGI/Primus, v0.2.0 to v26.5.1.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import ClassVar

from tprimat.engines.base import Availability, Command, Engine, Here, Where, refuse_bf16_states
from tprimat.engines.primus_settings import SAFE, experiment_text, overrides, rank_error_logs
from tprimat.errors import LaunchError, UserError
from tprimat.logs.fields import LineFields
from tprimat.logs.formats import primus as log_format
from tprimat.plan.schema import PlatformName, PrimusLauncher, PrimusOptions, PrimusStart, RunPlan

DIRECT = "runner/primus-cli-direct.sh"
"""Exists since v0.5.0, when primus-cli got its modes; v0.4.0 has a primus-cli without them."""
GIT_TIMEOUT_SECONDS = 10.0
"""--dirty compares every file, which is slow on a network file system."""
SLURM_ENTRY = "runner/primus-cli-slurm-entry.sh"
WITHOUT_CONTAINER = re.compile(r"primus-cli-\$\{\w*MODE\}\.sh")
"""Found in the entry script of versions that can run without a container; v0.7.0 to v26.4.0 cannot."""
CLI = ("primus-cli", "runner/primus-cli")
"""At the root since v26.2."""
SCRIPT = "examples/run_pretrain.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A Primus checkout or package."""

    place: str
    """As found, for messages."""
    root: Path | None
    """The checkout's root; None for an installed package."""
    cli: Path | None
    """primus-cli with its modes."""
    script: Path | None
    """run_pretrain.sh, which every version has."""


def find_primus(primus_path: str | None) -> str | None:
    """Return the user's Primus checkout, or the primus-cli on PATH."""
    if primus_path and Path(primus_path).is_dir():
        return primus_path
    return shutil.which("primus-cli")


def look(primus_path: str | None) -> Installation:
    """Inspect the user's checkout, or the primus-cli on PATH and the checkout around it.

    Raises:
        LaunchError: there is neither.
    """
    place = find_primus(primus_path)
    if place is None:
        raise LaunchError("Primus was not found.", fix="export PRIMUS_PATH=/path/to/Primus, or put primus-cli on PATH")
    found = Path(place).resolve()
    root = found if found.is_dir() else _checkout_around(found)
    if root is None:
        return Installation(place=place, root=None, cli=Path(place).absolute(), script=None)
    modes = (root / DIRECT).is_file()
    cli = next((root / name for name in CLI if (root / name).is_file()), None) if modes else None
    script = root / SCRIPT
    return Installation(place=place, root=root, cli=cli, script=script if script.is_file() else None)


def _checkout_around(program: Path) -> Path | None:
    return next((folder for folder in program.parents[:2] if (folder / "runner").is_dir() and (folder / "primus").is_dir()), None)


def find_installation(options: PrimusOptions, primus_path: str | None, nodes: int) -> PrimusStart:
    """Decide how to start Primus on this machine.

    Raises:
        LaunchError: Primus is missing, its version lacks the launcher, or the launcher cannot be measured on several nodes.
    """
    found = look(primus_path)
    launcher = _choose_launcher(options, found)
    program = found.script if launcher == "script" else found.cli
    if program is None:
        wanted = SCRIPT if launcher == "script" else DIRECT
        what = f"The Primus at {found.place} has no {wanted}."
        why = "primus-cli has its modes since v0.5.0." if launcher != "script" else "It belongs to a checkout."
        raise LaunchError(what, why=why, fix="PRIMUS_PATH with a checkout, or platform_optimizations.amd.primus.launcher: auto")
    if nodes > 1 and launcher != "slurm":
        raise LaunchError(
            f"Primus on {nodes} nodes is measured with the launcher slurm only.",
            why="The first node prints what runs, the last one how fast: one node's log proves nothing. srun joins the logs.",
            fix="--set platform_optimizations.amd.primus.launcher=slurm",
        )
    if launcher == "slurm":
        _check_slurm(options, found)
    return PrimusStart(
        program=str(program),
        launcher=launcher,
        directory=str(found.root) if found.root else None,
        version=version_of(found.root) if found.root else None,
        image=options.image,
        slurm_arguments=options.slurm_arguments,
        overrides=options.overrides,
    )


def _choose_launcher(options: PrimusOptions, found: Installation) -> PrimusLauncher:
    if options.launcher != "auto":
        return options.launcher
    return "direct" if found.cli else "script"


def version_of(root: Path) -> str | None:
    """Return tag and commit of a checkout, such as v26.5.1-3-gfd1eeabb; None if git or its history is missing."""
    if not (root / ".git").exists():  # git would search the parent folders
        return None
    argv = ["git", "-C", str(root), "describe", "--tags", "--always", "--dirty"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=GIT_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _check_slurm(options: PrimusOptions, found: Installation) -> None:
    if shutil.which("srun") is None:
        raise LaunchError("The launcher slurm needs srun, which is not on PATH.", fix="start inside a SLURM cluster")
    entry = found.root / SLURM_ENTRY if found.root else None
    if options.image is None and entry and entry.is_file() and not WITHOUT_CONTAINER.search(entry.read_text(encoding="utf8")):
        what = f"The Primus at {found.place} starts a container under slurm, and no image is named."
        why = "Versions v0.7.0 to v26.4.0 cannot run without a container."
        raise LaunchError(what, why=why, fix="--set platform_optimizations.amd.primus.image=rocm/primus:VERSION")


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
