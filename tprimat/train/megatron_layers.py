"""The two modules that Megatron-Core's local layer spec lacks without Transformer Engine: a norm and a core attention."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from tprimat.facts.models import ModelShape


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked so that Megatron sums its gradient over the tensor ranks under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, marked likewise."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class SDPACoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by torch's scaled_dot_product_attention: cuDNN, Flash or AOTriton on a GPU, fused on a CPU."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend.

        Args:
            query: shape (tokens, sequences, heads of this rank, head_dim).
            key: shape (tokens, sequences, key/value heads of this rank, head_dim).
            value: as key.

        Returns:
            shape (tokens, sequences, heads x head_dim).
        """
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=query.shape[2] != key.shape[2])
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def block_spec(config: TransformerConfig, shape: ModelShape, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage (or chunk of one), on torch alone."""
    norm = RMSNorm if shape.norm == "rmsnorm" else LayerNorm
    layer = get_gpt_layer_local_spec(normalization="RMSNorm" if norm is RMSNorm else None, qk_layernorm=shape.qk_norm)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    parts.sharded_state_dict_keys_map = {}
    attention = parts.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    layers = get_num_layers_to_build(config, vp_stage=virtual_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)
