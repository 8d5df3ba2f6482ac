"""Megatron's gradient buffer from step to step: what the first product of a step overwrites need not be cleared before.

Clearing writes four bytes a weight, and adding the first micro-batch's gradients to the zeros reads and writes as many again.
"""

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from torch.nn import Parameter

from tprimat.megatron.linear import ColumnLinear, RowLinear
from tprimat.megatron.loss import StreamedLossModel


def overwritten_weights(chunk: DistributedDataParallel) -> list[Parameter]:
    """Those of a chunk of the model whose modules begin each step anew."""
    found: list[Parameter] = []
    for part in chunk.modules():
        if isinstance(part, ColumnLinear | RowLinear) and part.split.fused:
            found.append(part.weight)
        if isinstance(part, StreamedLossModel) and part.post_process and part.accumulates:
            found.append(part.output_layer.weight)
    return [weight for weight in found if hasattr(weight, "main_grad")]


def begin_step(chunk: DistributedDataParallel, overwritten: Sequence[Parameter]) -> None:
    """Megatron's zero_grad_buffer, which clears all gradients, for a chunk of the model where only some need it.

    Args:
        chunk: whose step begins.
        overwritten: weights whose first gradient of a step overwrites, and which all get one.
    """
    old = set(overwritten)
    for weight in old:
        weight.gradient_is_old = True  # type: ignore[attr-defined]
    for parameter in chunk.params_with_grad:
        parameter.grad_added_to_main_grad = False
    if added_to := [parameter.main_grad for parameter in chunk.params_with_grad if parameter not in old]:
        torch._foreach_zero_(added_to)
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        group.reset()


def end_backward(overwritten: Sequence[Parameter]) -> None:
    """Check that no gradient of an earlier step is taken for one of this.

    Raises:
        RuntimeError: one of the weights got none.
    """
    if any(getattr(weight, "gradient_is_old", False) for weight in overwritten):
        raise RuntimeError("A weight got no gradient in this step; run with engine_options.accumulate_weight_gradients: false.")
