"""Engines whose training runs in our own worker under torchrun and writes its own records."""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

from tprimat.engines.base import Command, Engine
from tprimat.errors import LaunchError
from tprimat.logs.fields import LineFields
from tprimat.plan.schema import RunPlan
from tprimat.records.store import RunDirectory

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = {"llama": "pretrain_llama.py", "qwen": "pretrain_qwen.py"}
"""Model -> its training script at the top of a checkout. Other models, and an installed package, use the module."""
IN_A_CHECKOUT = all((ROOT / name).is_file() for name in SCRIPTS.values())


def worker_command(plan: RunPlan) -> Command:
    """Return the training script of the plan's model, to run once on each rank."""
    arguments = ("--plan", str(RunDirectory(Path(plan.run_directory)).plan_file))
    name = SCRIPTS.get(plan.model) if IN_A_CHECKOUT else None
    script = (str(ROOT / name),) if name else ("-m", "tprimat.train.worker")
    return Command(
        argv=(*script, *arguments),
        ranks_per_node=plan.gpus_per_node,
        environment={**bytecode_cache(), **plan.environment},
        directory=str(ROOT) if IN_A_CHECKOUT and not name else None,
    )


def bytecode_cache(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables that let Python store bytecode in the user's cache where the environment forbids storing it.

    Many container images do. Each rank would then compile torch, Megatron-Core and Lightning again in every run, which
    takes seconds before the first step. The user's cache keeps the package folders untouched.
    """
    if not environment.get("PYTHONDONTWRITEBYTECODE") or environment.get("PYTHONPYCACHEPREFIX"):
        return {}
    cache = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(cache) / "tprimat" / "bytecode")}


WORKER_MODULES = ("torch", "megatron.core", "numpy")
LIGHTNING = ("pytorch_lightning", "lightning")
INSTALL = "source .venv/bin/activate after `make install`, or pip install -r requirements.txt"


def require_worker_modules() -> None:
    """Check that this Python has what the worker needs, without importing it.

    Raises:
        LaunchError: a module is missing; names the first one.
    """
    missing = [name for name in WORKER_MODULES if not is_installed(name)]
    if not any(is_installed(name) for name in LIGHTNING):
        missing.append(LIGHTNING[0])
    if missing:
        what = f"The Python module {missing[0]} is not installed for {sys.executable}."
        raise LaunchError(what, why="Training needs it.", fix=INSTALL)


def is_installed(name: str) -> bool:
    """Return whether a module can be found. Only its parent packages are imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


class WorkerEngine(Engine):
    """A framework that our worker drives."""

    clock: ClassVar[Literal["step_end", "framework"]] = "step_end"

    def command(self, plan: RunPlan) -> Command:
        """Return the worker, to run on every rank."""
        return worker_command(plan)

    def read_line(self, text: str) -> LineFields | None:
        """Nothing: the worker writes steps.jsonl itself."""
        del text
        return None
