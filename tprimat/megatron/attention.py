"""Self-attention that splits the joint projection into queries, keys and values and rotates them by position, in one kernel each.

Megatron-Core splits, copies the queries (necessary under grouped-query attention) and rotates in a chain of small kernels, each
of which reads and writes all queries; and the same in the backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from tprimat.megatron.compat import compiled

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each (tokens, 1, 1, head_dim), both halves alike, fp32: a GPU reads them faster than it computes them."""


class RotarySelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's SelfAttention in a model that is configured without positions, because this class applies them."""

    def __init__(self, config: TransformerConfig, *arguments: Any, rotary: Callable[[int], Rotation], **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.rotary = rotary
        norms_are_fused = not config.qk_layernorm or isinstance(self.q_layernorm, NormScale)
        self.fused = norms_are_fused and config.num_query_groups >= config.tensor_model_parallel_size

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        """Project, split and rotate hidden states of shape (tokens of this rank, sequences, hidden).

        Returns:
            queries, keys and values, shape (tokens, sequences, heads of this rank, head_dim).
        """
        if not self.fused:
            query, key, value = super().get_query_key_value_tensors(hidden_states, *arguments, **options)
            cos, sin = self._rotation(query)
            rotated = compiled(rotate)
            return rotated(query, cos, sin), rotated(key, cos, sin), value
        joint, _ = self.linear_qkv(hidden_states)
        groups = joint.unflatten(-1, (self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head))
        scales: tuple[Tensor | None, ...] = (None, None)
        epsilon = 0.0
        if isinstance(self.q_layernorm, NormScale):
            # Called as modules, so that hooks which wait for gathered weights fire.
            scales, epsilon = (self.q_layernorm(None), self.k_layernorm(None)), self.q_layernorm.eps
        return SplitAndRotate.apply(groups, *scales, epsilon, *self._rotation(joint))  # type: ignore[no-untyped-call]

    def _rotation(self, rows: Tensor) -> Rotation:
        return self.rotary(rows.shape[0] * self.config.context_parallel_size)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions (RoFormer, arXiv:2104.09864), dimension i paired with i + head_dim / 2, in fp32.

    Args:
        x: shape (tokens, sequences, heads, head_dim).
        cos: see Rotation.
        sin: see Rotation; negated, it rotates back.
    """
    first, second = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class SplitAndRotate(torch.autograd.Function):
    """Split a joint projection into queries, keys and values, the first two rotated.

    With scales, an RMSNorm of each query and key head comes before its rotation (Qwen3, arXiv:2505.09388).
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - an autograd function takes tensors one by one
        ctx: Any, groups: Tensor, query_scale: Tensor | None, key_scale: Tensor | None, epsilon: float, cos: Tensor, sin: Tensor
    ) -> Any:
        """Run one kernel for each of the three.

        Args:
            ctx: stores the operands.
            groups: shape (tokens, sequences, key/value heads, queries of one of them + 2, head_dim).
            query_scale: shape (head_dim,); None for no norms.
            key_scale: shape (head_dim,); None for no norms.
            epsilon: of both norms.
            cos: see Rotation.
            sin: see Rotation.
        """
        ctx.epsilon = epsilon
        if query_scale is None:
            ctx.save_for_backward(cos, sin)
            return compiled(_split_and_rotate)(groups, cos, sin)
        ctx.save_for_backward(groups, query_scale, key_scale, cos, sin)
        return compiled(_split_norm_and_rotate)(groups, query_scale, key_scale, epsilon, cos, sin)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        """Rotate back, through the norms if there are any, and join, in one kernel."""
        if len(ctx.saved_tensors) == 2:
            return compiled(_rotate_back_and_join)(query, key, value, *ctx.saved_tensors), None, None, None, None, None
        of_groups, *of_scales = compiled(_norm_backward_and_join)((query, key, value), ctx.saved_tensors, ctx.epsilon)
        return of_groups, *of_scales, None, None, None


def _split_and_rotate(groups: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query = groups[..., :-2, :].flatten(2, 3)
    return rotate(query, cos, sin), rotate(groups[..., -2, :], cos, sin), groups[..., -1, :].contiguous()


def _rotate_back_and_join(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    queries = rotate(query, cos, -sin).reshape(*key.shape[:3], -1, key.shape[3])
    return torch.cat((queries, rotate(key, cos, -sin).unsqueeze(3), value.unsqueeze(3)), dim=3)


class NormScale(torch.nn.Module):
    """The scale of an RMSNorm that another module applies; it must be called, so that a hook can wait for gathered weights."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, _: None) -> torch.nn.Parameter:
        """Return the scale, shape (hidden_size,)."""
        return self.weight


def _split_norm_and_rotate(
    groups: Tensor, query_scale: Tensor, key_scale: Tensor, epsilon: float, *rotation: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    query = F.rms_norm(groups[..., :-2, :].flatten(2, 3), query_scale.shape, query_scale, epsilon)
    key = F.rms_norm(groups[..., -2, :], key_scale.shape, key_scale, epsilon)
    return rotate(query, *rotation), rotate(key, *rotation), groups[..., -1, :].contiguous()


def _norm_backward_and_join(
    gradients: tuple[Tensor, Tensor, Tensor], saved: tuple[Tensor, ...], epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    (query, key, value), (groups, query_scale, key_scale, cos, sin) = gradients, saved
    key_heads = key.shape[:3]
    of_query, query_total = _norm_backward(
        groups[..., :-2, :], rotate(query, cos, -sin).reshape(*key_heads, -1, key.shape[3]), query_scale, epsilon
    )
    of_key, key_total = _norm_backward(groups[..., -2:-1, :], rotate(key, cos, -sin).unsqueeze(3), key_scale, epsilon)
    return torch.cat((of_query, of_key, value.unsqueeze(3)), dim=3), query_total, key_total


def _norm_backward(x: Tensor, gradient: Tensor, scale: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of an RMSNorm's input and scale, from that of its result."""
    wide, incoming = x.float(), gradient.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    normed, scaled = wide * inverse, incoming * scale.float()
    of_input = inverse * (scaled - normed * (normed * scaled).mean(dim=-1, keepdim=True))
    return of_input.to(x.dtype), (incoming * normed).flatten(0, -2).sum(dim=0).to(scale.dtype)
