"""The embedded engine: Megatron-Core's model, schedules and optimizer under a Lightning Trainer.

Others call only `train`. It does in order what must happen before torch and Megatron-Core are imported.
"""

import os
from dataclasses import replace
from typing import Any

from tprimat.core.workload import FullWorkload
from tprimat.plan.schema import RunPlan, plan_of
from tprimat.train import startup


def train(work: RunPlan | FullWorkload, callback: Any = None, **chosen: Any) -> None:
    """Train a plan, or a workload, on this rank of torchrun. The process group stays open.

    Args:
        work: of a workload, the ranks are those of torchrun.
        callback: one of Lightning's, called beside the engine's own; a step's outputs are loss, grad_norm, learning_rate, tokens.
        chosen: fields of the plan of a workload, such as steps, seed, and run_directory (./tprimat-run), which gets the records.
    """
    if isinstance(work, RunPlan):
        plan = work
    else:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        ranks = {"gpus_per_node": here, "nodes": int(os.environ.get("WORLD_SIZE", "1")) // here}
        plan = plan_of(work, **{"run_directory": "tprimat-run", **ranks, **chosen})
    startup.import_torchmetrics()
    # Megatron-Core takes Transformer Engine's Adam wherever it finds the package: our own layers keep to our own optimizer.
    if plan.engine_options.layers == "local":
        startup.hide_transformer_engine()
    else:
        startup.transformer_engine_is_usable()
    from tprimat.megatron import bootstrap

    bootstrap.offer_wgrad_extension()
    redirected = bootstrap.redirect_to_cpu()
    import torch

    if plan is not work:
        plan = replace(plan, platform="cpu" if redirected else "amd" if torch.version.hip else "nvidia")
    from tprimat.megatron.training import fit

    startup.resume_garbage_collection()
    fit(plan, redirected, callback)
