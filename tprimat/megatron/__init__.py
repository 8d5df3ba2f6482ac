"""The embedded engine: Megatron-Core's model, schedules and optimizer under a Lightning Trainer.

Others call only `train`. It does in order what must happen before torch and Megatron-Core are imported.
"""

from typing import Any

from tprimat.plan.schema import RunPlan
from tprimat.train import startup


def train(plan: RunPlan, callback: Any = None) -> None:
    """Train a plan on this rank of torchrun; its run_directory gets the records. The process group stays open.

    `callback` is one of Lightning's, called beside the engine's own; a step's outputs are loss, grad_norm, learning_rate and
    tokens.
    """
    startup.import_torchmetrics()
    # Megatron-Core takes Transformer Engine's Adam wherever it finds the package: our own layers keep to our own optimizer.
    if plan.engine_options.layers == "local":
        startup.hide_transformer_engine()
    else:
        startup.transformer_engine_is_usable()
    from tprimat.megatron import bootstrap

    bootstrap.offer_wgrad_extension()
    redirected = bootstrap.redirect_to_cpu()
    from tprimat.megatron.training import fit

    startup.resume_garbage_collection()
    fit(plan, redirected, callback)
