"""Train a plan on the embedded engine: first what must happen before torch and Megatron-Core are imported, in this order."""

import os

from tprimat.plan.schema import RunPlan
from tprimat.train import startup


def train(plan: RunPlan) -> None:
    """Run a plan on this rank; torchrun has started as many ranks as the plan names. The process group stays open.

    Raises:
        UserError: this machine cannot do what the plan asks for.
    """
    if plan.platform == "nvidia":
        startup.open_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    startup.import_torchmetrics()
    from tprimat.megatron import wgrad
    from tprimat.train import cpu_redirect

    wgrad.install()
    redirected = cpu_redirect.install()
    from tprimat.megatron.training import fit

    startup.end_imports()
    fit(plan, redirected)
