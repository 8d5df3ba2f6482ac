"""Which engine carries out a plan, and why."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tprimat.engines import nemo
from tprimat.errors import LaunchError
from tprimat.plan import install
from tprimat.plan.schema import EngineName


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An engine and the reason for it, in words."""

    engine: EngineName
    reason: str


def choose(asked: str, platform: str, primus_path: str | None = None) -> Choice:
    """The engine that a user asked for, or the vendor's own where it is installed, or the embedded one.

    Args:
        asked: auto, megatron, nemo or primus.
        platform: nvidia, amd or cpu.
        primus_path: the user's Primus checkout.

    Raises:
        LaunchError: the engine that was asked for is not installed.
    """
    if asked == "megatron":
        return Choice(engine="megatron", reason="asked for")
    if asked == "nemo":
        _require_nemo()
        return Choice(engine="nemo", reason="asked for")
    if asked == "primus":
        _require_primus(primus_path)
        return Choice(engine="primus", reason="asked for")
    lacking = nemo.missing_parts() if platform == "nvidia" else []
    if platform == "nvidia" and not lacking:
        return Choice(engine="nemo", reason="NeMo is installed")
    if platform == "amd" and find_primus(primus_path):
        return Choice(engine="primus", reason=f"Primus is at {find_primus(primus_path)}")
    why = {"nvidia": f"NeMo needs {', '.join(lacking)}, not installed here", "amd": "Primus was not found"}.get(
        platform, "the only engine that runs on a CPU"
    )
    return Choice(engine="megatron", reason=why)


def find_primus(primus_path: str | None) -> str | None:
    """A Primus checkout, or the primus-cli on PATH."""
    if primus_path and Path(primus_path).is_dir():
        return primus_path
    return shutil.which("primus-cli")


def _require_nemo() -> None:
    missing = nemo.missing_parts()
    if missing:
        what = f"The engine nemo needs {', '.join(missing)}, not installed for {sys.executable}."
        raise LaunchError(what, why="NeMo's recipes import it.", fix=install.NEMO)


def _require_primus(primus_path: str | None) -> None:
    if find_primus(primus_path) is None:
        what = f"There is no folder {primus_path} (PRIMUS_PATH)." if primus_path else "Primus was not found."
        fix = "export PRIMUS_PATH=/path/to/Primus, or put primus-cli on PATH; or --engine megatron"
        raise LaunchError(what, why="The engine primus starts AMD's Primus.", fix=fix)
