"""The layers that Megatron-Core's local spec lacks without Transformer Engine: norms, residual sums, SwiGLU and core attention.

What is element-wise is compiled in small regions that all layers share, so that compile time does not grow with depth. Matrix
products and collectives stay outside of them, in Megatron's order.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from tprimat.facts.models import ModelShape
from tprimat.megatron import attention as context_parallel
from tprimat.megatron import compat
from tprimat.megatron.attention import RotarySelfAttention, Rotation
from tprimat.megatron.compat import compiled
from tprimat.megatron.linear import ColumnLinear, RowLinear


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm (Megatron's own refuses sequence parallelism), marked so that tensor ranks sum its gradient."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Torch's RMSNorm as a function, to compile."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


class CompiledRMSNorm(RMSNorm):
    """RMSNorm with forward and backward each in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return compiled(rms_norm)(x, self.weight, self.eps)  # type: ignore[no-any-return]


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, marked in the same way."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


# A transformer layer in which each residual sum and the norm after it are one kernel, forward and backward.

DeferredSum = tuple[Tensor, Tensor]
"""Two tensors of one shape in place of their sum, which the next layer computes."""


class SumRMSNorm(CompiledRMSNorm):
    """Residual sum and RMSNorm in one kernel."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> DeferredSum:  # type: ignore[override]
        """Return the sum of both arguments (or the only one), and the same normalised in its last dimension."""
        if residual is None:
            return x, super().forward(x)
        return compiled(_sum_and_norm)(x, residual, self.weight, self.eps)  # type: ignore[no-any-return]


class FusedLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's TransformerLayer for training without dropout and biases; both of its norms are a SumRMSNorm."""

    defers_residual_add = False
    """Whether the next layer computes the sum at the end of this one, together with its first norm."""

    def forward(
        self, hidden_states: Tensor | DeferredSum, attention_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor | DeferredSum, None]:
        """Attention and feed-forward block, each around the residual stream; shape (tokens, sequences, hidden) in and out."""
        summands = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        # Called as modules, so that hooks which wait for gathered weights fire.
        stream, normed = self.input_layernorm(*summands)
        attention, _none = self.self_attention(normed, attention_mask=attention_mask)
        stream, normed = self.pre_mlp_layernorm(attention, stream)
        feed_forward, _none = self.mlp(normed)
        return (feed_forward, stream) if self.defers_residual_add else feed_forward + stream, None


def defer_residual_add(model: GPTModel) -> None:
    """Let each layer of a chunk but the last leave its final sum to the next. Full recomputation stores one tensor: not there."""
    if model.config.recompute_granularity == "full":
        return
    for layer in model.decoder.layers[:-1]:
        if isinstance(layer, FusedLayer):
            layer.defers_residual_add = True


def _sum_and_norm(branch: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    stream = branch + residual
    return stream, rms_norm(stream, weight, epsilon)


# SwiGLU's feed-forward block with an activation whose backward pass is one kernel at the memory's bandwidth.
#
# A compiled gradient that ends in a concatenation stays well below it. The same function with the two halves as separate outputs,
# which here are views of one buffer, needs no concatenation.


class SwiGLUMLP(MLP):  # type: ignore[misc]
    """Megatron's MLP for gated layers without biases."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Gate and up projection in one product, activation, down projection; shape (tokens, sequences, hidden) in and out."""
        joint, _none = self.linear_fc1(hidden_states)
        out, _none = self.linear_fc2(SwiGLU.apply(joint))  # type: ignore[no-untyped-call]
        return out, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) x up (arXiv:2002.05202)."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor) -> Tensor:
        """Shape (..., 2 x ffn), gate before up -> (..., ffn)."""
        ctx.save_for_backward(joint)
        return compiled(_swiglu)(joint)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Write both halves of the gradient into one buffer."""
        (joint,) = ctx.saved_tensors
        out = torch.empty_like(joint)
        # As matrices: torch.compile can then tell that the two views do not overlap, and writes both in one kernel.
        compiled(_swiglu_backward)(gradient.flatten(0, -2), joint.flatten(0, -2), *out.view(-1, out.shape[-1]).chunk(2, dim=-1))
        return out


def _swiglu(joint: Tensor) -> Tensor:
    gate, up = joint.chunk(2, dim=-1)
    return F.silu(gate) * up


def _swiglu_backward(gradient: Tensor, joint: Tensor, gate_gradient: Tensor, up_gradient: Tensor) -> None:
    gate, up = (half.float() for half in joint.chunk(2, dim=-1))
    sigmoid = torch.sigmoid(gate)
    gate_gradient.copy_(gradient * up * sigmoid * (1 + gate * (1 - sigmoid)))
    up_gradient.copy_(gradient * gate * sigmoid)


# Core attention, and the spec that puts all of it together.


class SDPACoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by torch's scaled_dot_product_attention: cuDNN, Flash or AOTriton on a GPU, a fused kernel on a CPU."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.backend: str | None = None
        """Name of the kernels that torch selected; None before the first call."""

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
            out = context_parallel.attention_over_gathered_kv(query, key, value)
        else:
            q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            grouped = query.shape[2] != key.shape[2]
            self.backend = self.backend or compat.attention_backend_name(q, k, v, grouped=grouped)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def block_spec(
    config: TransformerConfig,
    shape: ModelShape,
    virtual_stage: int | None,
    rotary: Callable[[int], Rotation] | None,
    linear: tuple[type[ColumnLinear], type[RowLinear]] | None = None,
) -> TransformerBlockSubmodules:
    """Return the spec of the layers of one pipeline stage, or chunk of one, on torch alone.

    Args:
        config: of the whole model.
        shape: of the whole model.
        virtual_stage: chunk of this rank under virtual pipelining.
        rotary: tokens -> cosines and sines, for compiled regions; None leaves positions to Megatron.
        linear: modules for the matrix products; None leaves them to Megatron.
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
