"""Which engine carries out a plan, and why."""

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tprimat.errors import LaunchError
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
    if platform == "nvidia" and has_nemo():
        return Choice(engine="nemo", reason="NeMo is installed")
    if platform == "amd" and find_primus(primus_path):
        return Choice(engine="primus", reason=f"Primus is at {find_primus(primus_path)}")
    why = {"nvidia": "NeMo is not installed", "amd": "Primus was not found"}.get(platform, "the only engine that runs on a CPU")
    return Choice(engine="megatron", reason=why)


def has_nemo() -> bool:
    """Whether NeMo 2's package is there; its recipes may still fail to import, which the worker then says."""
    return find_spec("nemo") is not None and find_spec("nemo_run") is not None


def find_primus(primus_path: str | None) -> str | None:
    """A Primus checkout, or the primus-cli on PATH."""
    if primus_path and Path(primus_path).is_dir():
        return primus_path
    return shutil.which("primus-cli")


def _require_nemo() -> None:
    missing = [name for name in ("nemo", "nemo_run") if find_spec(name) is None]
    if missing:
        raise LaunchError(
            f"The engine nemo needs the Python module {missing[0]}, which is not installed.",
            fix="make nemo, then .venv-nemo/bin/python benchmark.py --engine nemo; or --engine megatron",
        )


def _require_primus(primus_path: str | None) -> None:
    if find_primus(primus_path) is None:
        what = f"There is no folder {primus_path} (PRIMUS_PATH)." if primus_path else "Primus was not found."
        fix = "export PRIMUS_PATH=/path/to/Primus, or put primus-cli on PATH; or --engine megatron"
        raise LaunchError(what, why="The engine primus starts AMD's Primus.", fix=fix)
