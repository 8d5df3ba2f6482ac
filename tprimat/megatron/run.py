"""Start training on the embedded engine: what must happen before torch and Megatron-Core are imported, in this order."""

import os

from tprimat.plan.schema import RunPlan
from tprimat.train import startup


def train(plan: RunPlan) -> None:
    """Train a plan on this rank of torchrun. The process group stays open.

    Raises:
        UserError: this machine cannot do what the plan asks for.
    """
    if plan.platform == "nvidia":
        startup.prefetch_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    startup.import_torchmetrics()
    from tprimat.megatron import bootstrap

    bootstrap.offer_wgrad_extension()
    redirected = bootstrap.redirect_to_cpu()
    from tprimat.megatron.training import fit

    startup.resume_garbage_collection()
    fit(plan, redirected)
