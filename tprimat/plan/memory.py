"""Estimate from below how much memory a plan needs."""

from tprimat.facts.flops import parameters
from tprimat.plan.schema import RunPlan

WEIGHT_BYTES = {"bf16": 2, "fp8": 2, "fp32": 4}
"""Of each weight that is computed with; fp8 converts bf16 weights."""
GRADIENT_BYTES = 4
"""Gradients are added up in fp32."""
ADAM_BYTES = 8
"""Two moments in fp32."""
MASTER_BYTES = 4
"""The fp32 copy of a bf16 weight."""
BF16_STATE_BYTES = 2 + 2 * 2
"""Gradients and moments in bf16, without masters: optimizer_states bf16."""


def state_bytes(plan: RunPlan) -> int | None:
    """Return the least bytes that the weights, gradients and optimizer states of one rank take, without any activation.

    An even split of the model is assumed. None for a model with experts that are spread over ranks.
    """
    layout, options = plan.layout, plan.engine_options
    if layout.expert != 1:
        return None
    weights = parameters(plan.shape).total / (layout.tensor * layout.pipeline)
    weight_bytes = WEIGHT_BYTES[plan.precision]
    if options.optimizer_states == "bf16":
        return round(weights * (weight_bytes + BF16_STATE_BYTES))
    states = ADAM_BYTES + (MASTER_BYTES if weight_bytes < MASTER_BYTES else 0)
    shards = layout.data * layout.context if options.distributed_optimizer else 1
    return round(weights * (weight_bytes + GRADIENT_BYTES + states / shards))
