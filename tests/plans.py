"""What the command line decides of a plan, so that a test says only what it is about."""

from tprimat.plan.build import PlanRequest


def request_of(model, strategy, **fields):
    """Return a request for the embedded engine on a node of eight NVIDIA GPUs, unless `fields` say otherwise."""
    usual = {
        "platform": "nvidia",
        "size": "full",
        "engine": "megatron",
        "engine_reason": "test",
        "gpus_found": 8,
        "run_id": "run",
        "run_directory": "/nowhere/runs/run",
        "output_directory": "/nowhere",
    }
    return PlanRequest(model=model, strategy=strategy, **{**usual, **fields})
