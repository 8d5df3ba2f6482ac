"""Find an installed Primus and decide how to start it."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tprimat.errors import LaunchError
from tprimat.plan.schema import PrimusLauncher, PrimusOptions, PrimusStart

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


def _launcher(options: PrimusOptions, found: Installation) -> PrimusLauncher:
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
