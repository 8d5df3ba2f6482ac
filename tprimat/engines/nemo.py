"""NeMo 2's pre-training recipes, on CUDA; redirected to the CPU for a check that they run."""

import subprocess
import sys
from functools import cache

from tprimat.engines.base import Command
from tprimat.engines.worker import WorkerEngine, is_there
from tprimat.errors import LaunchError
from tprimat.plan.nemo import refusal, without_transformer_engine
from tprimat.plan.schema import RunPlan

REQUIRED_MODULES = ("torch", "lightning", "megatron.core", "nemo", "nemo_run", "fiddle", "modelopt")
"""What the recipes import at their top."""
TRANSFORMER_ENGINE = "transformer_engine"
IMPORT_SECONDS = 300.0
"""On a cold disk of a cluster."""


class NemoEngine(WorkerEngine):
    """NeMo's recipes in our worker."""

    def command(self, plan: RunPlan) -> Command:
        """The worker, on every rank.

        Raises:
            LaunchError: no recipe can express the plan.
        """
        if unfit := refusal(plan):
            raise unfit
        return super().command(plan)


ENGINE = NemoEngine("nemo")


def missing_parts() -> list[str]:
    """Modules that NeMo's recipes need and this Python does not have; nothing is imported to find out."""
    return [name for name in REQUIRED_MODULES if not is_there(name)]


def unfit(plan: RunPlan) -> LaunchError | None:
    """Why NeMo, as installed here, cannot carry out a plan; None: it can. Transformer Engine is tried where the plan needs it."""
    if found := refusal(plan):
        return found
    found = without_transformer_engine(plan)
    return found if found and not imports(f"{TRANSFORMER_ENGINE}.pytorch") else None


@cache
def imports(name: str) -> bool:
    """Whether a module can be imported, which a package that is only there may fail: tried in a process of its own."""
    if not is_there(name.partition(".")[0]):
        return False
    try:
        done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
