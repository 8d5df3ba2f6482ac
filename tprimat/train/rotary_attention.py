"""Self-attention that cuts the joint projection into queries, keys and values and turns them by position, in one kernel.

Megatron-Core's own order is a cut, a copy of the queries (which grouped-query attention makes necessary) and a chain of
small kernels for the rotation, each of which reads and writes all queries; and the same backwards.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from tprimat.train.compilation import compiled


class RotarySelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's SelfAttention, told that there are no positions: it gets them from here."""

    def __init__(self, config: TransformerConfig, *arguments: Any, rotary: Callable[[int], Tensor], **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.rotary = rotary
        self.fused = not config.qk_layernorm and config.num_query_groups >= config.tensor_model_parallel_size

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        """Project, cut and turn.

        Args:
            hidden_states: shape (tokens of this rank, sequences, hidden).
            arguments: Megatron's, for what training has no use for.
            options: likewise.

        Returns:
            queries, keys and values, shape (tokens, sequences, heads of this rank, head_dim).
        """
        if not self.fused:
            query, key, value = super().get_query_key_value_tensors(hidden_states, *arguments, **options)
            return *compiled(rotate)(query, key, self._angles(query)), value
        joint, _ = self.linear_qkv(hidden_states)
        groups = joint.unflatten(-1, (self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head))
        return compiled(cut_and_rotate)(groups, self._angles(joint))

    def _angles(self, rows: Tensor) -> Tensor:
        return self.rotary(rows.shape[0] * self.config.context_parallel_size)


def rotate(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions (RoFormer, arXiv:2104.09864), dimension i paired with i + head_dim / 2, in fp32.

    Args:
        query: shape (tokens, sequences, heads, head_dim).
        key: shape (tokens, sequences, key/value heads, head_dim).
        angles: shape (tokens, 1, 1, head_dim), both halves alike, radians.
    """
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    return turned(query), turned(key)


def cut_and_rotate(groups: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a joint projection, the first two turned.

    Args:
        groups: shape (tokens, sequences, key/value heads, queries of one of them + 2, head_dim).
        angles: as rotate's.
    """
    query = groups[..., :-2, :].flatten(2, 3)
    turned_query, turned_key = rotate(query, groups[..., -2, :], angles)
    return turned_query, turned_key, groups[..., -1, :].contiguous()
