"""Norm and clipping of many gradients in a few kernels, without Transformer Engine and Apex.

Megatron-Core's own fallback asks the device for the norm of each tensor, one by one (`torch.tensor` of a list of device
scalars), and scales each into a temporary. These two take its place under the same interface.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


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


@contextmanager
def clipping_through(take: Callable[[float], None]) -> Iterator[None]:
    """Within it, Megatron leaves gradients as they are and tells somebody the factor of a clipping, who applies it later.

    Args:
        take: called in each step that clips, with the factor.
    """
    from megatron.core.optimizer import clip_grads

    def note(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], factor: float) -> None:
        del chunk_size, noop_flag, tensor_lists
        take(factor)

    before = clip_grads.multi_tensor_scale_impl
    clip_grads.multi_tensor_scale_impl = note
    try:
        yield
    finally:
        clip_grads.multi_tensor_scale_impl = before
