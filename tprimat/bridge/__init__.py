"""Train a plan with a recipe of Megatron-Bridge and its own pretrain(). Importing this module imports nothing from Bridge."""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from tprimat.core.errors import LaunchError
from tprimat.engines.bridge import ENGINE
from tprimat.megatron import bootstrap
from tprimat.plan.schema import RunPlan
from tprimat.train import startup

VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""What a rank gets unless its recipe says otherwise: one hardware queue."""
RESTARTED = "TPRIMAT_RECIPE_VARIABLES"
"""Set where this rank has started again with the variables of its recipe."""


def train(plan: RunPlan) -> None:
    """Train a plan on this rank of torchrun."""
    usual = {name: value for name, value in VARIABLES.items() if name not in os.environ}
    os.environ.update(usual)  # before anything opens the GPU
    # Before anything imports megatron.core.
    if find_spec(startup.TRANSFORMER_ENGINE) is not None and not startup.transformer_engine_is_usable():
        raise LaunchError("Transformer Engine cannot be imported.", why="Bridge's layers need it.", fix=ENGINE.install)
    bootstrap.offer_wgrad_extension()  # NVIDIA's container has Apex's
    from tprimat.bridge import compat

    compat.skip_dataset_helpers()
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from tprimat.bridge.callback import Reporter
    from tprimat.bridge.recipe import build_config

    cfg = build_config(plan)
    restart_with({name: str(value) for name, value in getattr(cfg, "env_vars", {}).items()}, usual)
    startup.resume_garbage_collection()
    pretrain(cfg, forward_step, callbacks=[Reporter(plan, cfg)])


def restart_with(variables: Mapping[str, str], usual: Mapping[str, str]) -> None:
    """Start this rank's program again where its recipe wants variables that neither the user nor `usual` has set so.

    Libraries read some of them only when they are loaded. A rank whose recipe wants none goes on, and imports nothing twice.
    """
    missing = {name: value for name, value in variables.items() if name not in os.environ or usual.get(name, value) != value}
    if missing and RESTARTED not in os.environ:
        os.environ.update(missing, **{RESTARTED: "1"})
        sys.stdout.flush()
        os.execv(sys.executable, sys.orig_argv)
