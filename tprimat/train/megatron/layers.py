"""The modules that Megatron-Core's local layer spec lacks without Transformer Engine: norms and a core attention.

What is element-wise is compiled in three small regions that all layers share, so the compile time does not grow with
depth; matrix products and collectives stay outside of them, as Megatron orders them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor
from torch.nn.attention import SDPBackend

from tprimat.facts.models import ModelShape
from tprimat.train.megatron import context_parallel
from tprimat.train.megatron.fused_layer import FusedLayer, SumRMSNorm
from tprimat.train.megatron.linear import ColumnLinear, RowLinear
from tprimat.train.megatron.norms import CompiledRMSNorm, LayerNorm, RMSNorm
from tprimat.train.megatron.rotary_attention import RotarySelfAttention, Rotation
from tprimat.train.megatron.swiglu import SwiGLUMLP


class SDPACoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by torch's scaled_dot_product_attention: cuDNN, Flash or AOTriton on a GPU, fused on a CPU."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.backend: str | None = None
        """Name of the kernel family that torch chose, once it has."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend.

        Args:
            query: shape (tokens, sequences, heads of this rank, head_dim).
            key: shape (tokens, sequences, key/value heads of this rank, head_dim).
            value: as key.

        Returns:
            shape (tokens, sequences, heads x head_dim).
        """
        if self.config.context_parallel_size > 1:
            out = context_parallel.attend(query, key, value)
        else:
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            grouped = query.shape[2] != key.shape[2]
            self.backend = self.backend or chosen_backend(q, k, v, grouped=grouped)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def chosen_backend(query: Tensor, key: Tensor, value: Tensor, *, grouped: bool) -> str:
    """What torch's own selection answers for these tensors: cudnn_attention, flash_attention, efficient_attention or math."""
    choice = torch._fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=grouped)
    return SDPBackend(choice).name.lower()


def block_spec(
    config: TransformerConfig,
    shape: ModelShape,
    virtual_stage: int | None,
    rotary: Callable[[int], Rotation] | None,
    linear: tuple[type[ColumnLinear], type[RowLinear]] | None = None,
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage (or chunk of one), on torch alone.

    Args:
        config: of the whole model.
        shape: of the whole model.
        virtual_stage: chunk of this rank under virtual pipelining.
        rotary: tokens -> cosines and sines, if the compiled regions are wanted; None leaves the positions to Megatron.
        linear: modules of the matrix products; None leaves them to Megatron.
    """
    norm: type[torch.nn.Module] = LayerNorm
    if shape.norm == "rmsnorm":
        norm = CompiledRMSNorm if rotary else RMSNorm
    layer = get_gpt_layer_local_spec(normalization="RMSNorm" if shape.norm == "rmsnorm" else None, qk_layernorm=shape.qk_norm)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    parts.sharded_state_dict_keys_map = {}
    if rotary:
        parts.self_attention.module = RotarySelfAttention
        parts.self_attention.params["rotary"] = rotary
        if shape.gated and not shape.linear_bias:
            parts.mlp.module = SwiGLUMLP
        if shape.norm == "rmsnorm" and not shape.linear_bias:
            layer.module, parts.input_layernorm, parts.pre_mlp_layernorm = FusedLayer, SumRMSNorm, SumRMSNorm
    attention, mlp = parts.self_attention.submodules, parts.mlp.submodules
    attention.core_attention = SDPACoreAttention
    if linear:
        attention.linear_qkv, attention.linear_proj = linear
        mlp.linear_fc1, mlp.linear_fc2 = linear
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    layers = get_num_layers_to_build(config, vp_stage=virtual_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)
