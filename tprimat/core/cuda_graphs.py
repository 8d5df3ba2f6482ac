"""What the embedded engine can launch as CUDA graphs."""

from typing import Literal

from tprimat.core.workload import Workload

Obstacle = Literal["pipeline", "context", "experts", "recompute", "fully_shard", "fp8"]


def obstacle(work: Workload, *, fully_shard: bool, own_layers: bool) -> Obstacle | None:
    """Return the first reason why micro-batches cannot be launched as CUDA graphs, or have never been; None if they can.

    `fully_shard`: replicas share the weights. `own_layers`: the layers are the engine's own, not Transformer Engine's.
    """
    reasons: dict[Obstacle, bool] = {
        "pipeline": (work.pipeline_parallel or 1) > 1,
        "context": (work.context_parallel or 1) > 1,
        "experts": work.shape is not None and work.shape.experts is not None,
        "recompute": (work.recompute or "none") != "none",
        "fully_shard": fully_shard,
        "fp8": work.matmul_dtype == "fp8" and not own_layers,
    }
    return next((name for name, applies in reasons.items() if applies), None)
