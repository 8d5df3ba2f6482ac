"""Which Primus there is and how it can be started: the one part of the engine that looks at files."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tprimat.engines.choose import find_primus
from tprimat.errors import LaunchError
from tprimat.plan.schema import PrimusLauncher, PrimusOptions, PrimusStart

DIRECT = "runner/primus-cli-direct.sh"
"""There since v0.5.0, when primus-cli got its modes; v0.4.0 has a primus-cli without them."""
GIT_PATIENCE_SECONDS = 10.0
"""--dirty compares every file, which takes a while on a network file system."""
SLURM_ENTRY = "runner/primus-cli-slurm-entry.sh"
WITHOUT_CONTAINER = re.compile(r"primus-cli-\$\{\w*MODE\}\.sh")
"""What the entry of a version holds that can do without a container: not from v0.7.0 to v26.4.0."""
CLI = ("primus-cli", "runner/primus-cli")
"""At the root since v26.2."""
SCRIPT = "examples/run_pretrain.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What is there."""

    place: str
    """For messages."""
    root: Path | None
    """Of a checkout; None for an installed package."""
    cli: Path | None
    """primus-cli with its modes."""
    script: Path | None
    """run_pretrain.sh, which every version has."""


def look(primus_path: str | None) -> Installed:
    """The checkout that the user names, or the primus-cli on PATH and the checkout around it.

    Raises:
        LaunchError: neither.
    """
    place = find_primus(primus_path)
    if place is None:
        raise LaunchError("Primus was not found.", fix="export PRIMUS_PATH=/path/to/Primus, or put primus-cli on PATH")
    found = Path(place).resolve()
    root = found if found.is_dir() else _checkout_around(found)
    if root is None:
        return Installed(place=place, root=None, cli=Path(place).absolute(), script=None)
    modes = (root / DIRECT).is_file()
    cli = next((root / name for name in CLI if (root / name).is_file()), None) if modes else None
    script = root / SCRIPT
    return Installed(place=place, root=root, cli=cli, script=script if script.is_file() else None)


def _checkout_around(program: Path) -> Path | None:
    return next((folder for folder in program.parents[:2] if (folder / "runner").is_dir() and (folder / "primus").is_dir()), None)


def decide(options: PrimusOptions, primus_path: str | None, nodes: int) -> PrimusStart:
    """How to start Primus on this machine.

    Raises:
        LaunchError: it is not there, not in a version that has the launcher, or cannot be measured on so many nodes.
    """
    found = look(primus_path)
    launcher = _launcher(options, found)
    program = found.script if launcher == "script" else found.cli
    if program is None:
        wanted = SCRIPT if launcher == "script" else DIRECT
        what = f"The Primus at {found.place} has no {wanted}."
        why = "primus-cli has its modes since v0.5.0." if launcher != "script" else "It belongs to a checkout."
        raise LaunchError(what, why=why, fix="PRIMUS_PATH with a checkout, or platform_optimizations.amd.primus.launcher: auto")
    if nodes > 1 and launcher != "slurm":
        raise LaunchError(
            f"Primus on {nodes} nodes is measured with the launcher slurm only.",
            why="The first node prints what runs, the last one how fast: a node alone proves nothing. srun brings both together.",
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


def _launcher(options: PrimusOptions, found: Installed) -> PrimusLauncher:
    if options.launcher != "auto":
        return options.launcher
    return "direct" if found.cli else "script"


def version_of(root: Path) -> str | None:
    """Tag and commit of a checkout, such as v26.5.1-3-gfd1eeabb; None where git or its history is missing."""
    if not (root / ".git").exists():  # git would look in the folders above
        return None
    argv = ["git", "-C", str(root), "describe", "--tags", "--always", "--dirty"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=GIT_PATIENCE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _check_slurm(options: PrimusOptions, found: Installed) -> None:
    if shutil.which("srun") is None:
        raise LaunchError("The launcher slurm needs srun, which is not on PATH.", fix="start inside a SLURM cluster")
    entry = found.root / SLURM_ENTRY if found.root else None
    if options.image is None and entry and entry.is_file() and not WITHOUT_CONTAINER.search(entry.read_text(encoding="utf8")):
        what = f"The Primus at {found.place} starts a container under slurm, and no image is named."
        why = "Versions v0.7.0 to v26.4.0 cannot do without."
        raise LaunchError(what, why=why, fix="--set platform_optimizations.amd.primus.image=rocm/primus:VERSION")
