"""Engines whose training runs in our own worker, started by torchrun: they write their records themselves."""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from tprimat.engines.base import Command
from tprimat.errors import LaunchError
from tprimat.logs.fields import LineFields
from tprimat.plan.schema import RunPlan
from tprimat.records.store import RunDirectory

ROOT = Path(__file__).parent.parent.parent
DOORS = {"llama": "pretrain_llama.py", "qwen": "pretrain_qwen.py"}


def worker_command(plan: RunPlan) -> Command:
    """The training script of a plan's model, once on each rank; other models than the two with a script share one module."""
    arguments = ("--plan", str(RunDirectory(Path(plan.run_directory)).plan_file))
    door = DOORS.get(plan.model)
    script = (str(ROOT / door),) if door else ("-m", "tprimat.train.worker")
    return Command(
        argv=(*script, *arguments),
        ranks_per_node=plan.gpus_per_node,
        environment={**bytecode_kept(), **plan.environment},
        directory=None if door else str(ROOT),
    )


def bytecode_kept(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What to add to an environment that keeps Python from storing bytecode, as container images like to.

    Each rank would compile torch, Megatron-Core and Lightning anew in every run: seconds before the first step. The bytecode
    goes to the user's cache, so that nothing is written beside the packages.
    """
    if not environment.get("PYTHONDONTWRITEBYTECODE") or environment.get("PYTHONPYCACHEPREFIX"):
        return {}
    cache = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(cache) / "tprimat" / "bytecode")}


WORKER_MODULES = ("torch", "megatron.core", "numpy")
LIGHTNING = ("pytorch_lightning", "lightning")
HOW_TO_INSTALL = "source .venv/bin/activate after `make install`, or pip install -r requirements.txt"


def require_worker_modules() -> None:
    """Check, without importing them, that the worker will find what it needs in this Python.

    Raises:
        LaunchError: names the first module that is missing.
    """
    missing = [name for name in WORKER_MODULES if not is_there(name)]
    if not any(is_there(name) for name in LIGHTNING):
        missing.append(LIGHTNING[0])
    if missing:
        what = f"The Python module {missing[0]} is not installed for {sys.executable}."
        raise LaunchError(what, why="Training needs it.", fix=HOW_TO_INSTALL)


def is_there(name: str) -> bool:
    """Whether a module can be found; only its parent packages are imported for that."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


class WorkerEngine:
    """A framework that our worker drives."""

    def __init__(self, name: str) -> None:
        self.name = name

    def command(self, plan: RunPlan) -> Command:
        """The worker, on every rank."""
        return worker_command(plan)

    def read_line(self, text: str) -> LineFields | None:
        """Nothing: the worker writes steps.jsonl itself."""
        del text
        return None
