"""Norm and clipping of many gradients in a few kernels, without Transformer Engine and Apex.

Megatron-Core's own fallback asks the device for the norm of each tensor, one by one (`torch.tensor` of a list of device
scalars), and scales each into a temporary. `l2_norm` and `scale` take its place under the same interface. An optimizer that clips
while it updates needs neither Megatron's scaling nor the norm on the host: `norm_over_ranks` and `clipping_factor`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NOTHING = torch.empty(0)


def l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool, *_: Any
) -> tuple[Tensor, None]:
    """Of all tensors together, shape (1,), fp32, on their device; nothing waits for it.

    Args:
        chunk_size: unused, the interface's.
        noop_flag: unused, the interface's.
        tensor_lists: one list of gradients.
        per_tensor: unused: Megatron never asks for it.

    Returns:
        the norm, and None for the norms of each.
    """
    del chunk_size, noop_flag, per_tensor
    norms = torch._foreach_norm(tensor_lists[0], 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], factor: float) -> None:
    """Multiply in place: both lists are the same gradients."""
    del chunk_size, noop_flag
    sources, targets = tensor_lists
    if any(
        source is not target and source.data_ptr() != target.data_ptr() for source, target in zip(sources, targets, strict=True)
    ):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)


def install() -> None:
    """Replace Megatron's fallbacks; where Transformer Engine or Apex brings kernels of its own, those stay."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl in (utils.local_multi_tensor_l2_norm, l2_norm):  # or ours from an earlier training
        clip_grads.l2_norm_impl = l2_norm
        clip_grads.multi_tensor_scale_impl = scale


def norm_over_ranks(optimizers: Sequence[Any]) -> Tensor:
    """Of all gradients of the model together, shape (1,), fp32, on their device; as Megatron takes it, but nothing waits for it.

    Args:
        optimizers: Megatron's, which know their gradients and the ranks that hold others.
    """
    squares = []
    for optimizer in optimizers:
        gradients = optimizer.get_main_grads_for_grad_norm()
        # A stage may have no gradient that counts, and its ranks still take part in the sum.
        norm = l2_norm(0, NOTHING, [gradients], False)[0] if gradients else torch.zeros(1, device=torch.cuda.current_device())
        square = norm.square()
        dist.all_reduce(square, group=optimizer.get_grad_stats_parallel_group())
        squares.append(square)
    return torch.stack(squares).sum(dim=0).sqrt()


def clipping_factor(norm: Tensor, largest: float) -> Tensor:
    """What gradients of this norm are multiplied with, shape as norm: 1 up to the largest norm, and for one that is no number.

    Args:
        norm: fp32.
        largest: 0 never clips.
    """
    factor = largest / (norm + 1e-6)
    return torch.where(factor < 1.0, factor, 1.0) if largest > 0 else torch.ones_like(norm)
