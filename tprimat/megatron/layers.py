"""The layers that Megatron-Core's local spec lacks without Transformer Engine: norms, residual sums, SwiGLU and core attention.

What is element-wise is compiled in small regions that all layers share, so that compile time does not grow with depth. Matrix
products and collectives stay outside of them, in Megatron's order.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor

from tprimat.core.models import ModelShape
from tprimat.megatron import compat
from tprimat.megatron.attention import LatentAttention, NormScale, RotarySelfAttention, Rotation, SDPACoreAttention
from tprimat.megatron.compat import compiled
from tprimat.megatron.experts import ExpertsLayer, swiglu, swiglu_gradient, swiglu_gradients
from tprimat.megatron.linear import ColumnLinear, RowLinear, with_row_maxima


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Torch's RMSNorm as a function, to compile."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm (Megatron's own refuses sequence parallelism), forward and backward each in one kernel."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # tensor ranks sum its gradient

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return compiled(rms_norm)(x, self.weight, self.eps)  # type: ignore[no-any-return]


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, marked in the same way; not compiled."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


# A transformer layer in which the residual sum after attention and the norm after it are one kernel, forward and backward.


class SumRMSNorm(RMSNorm):
    """Residual sum and RMSNorm in one kernel."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the sum of both arguments (or the only one), and the same normalized in its last dimension."""
        if residual is None:
            return x, super().forward(x)
        return compiled(_sum_and_norm)(x, residual, self.weight, self.eps)  # type: ignore[no-any-return]


class SumRMSNormMaxima(SumRMSNorm):
    """The same for products in 8 bits: the normalized tensor comes with its rows' maxima."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """See SumRMSNorm."""
        stream = x
        if residual is None:
            normed, maxima = compiled(_norm_and_maxima)(x, self.weight, self.eps)
        else:
            stream, normed, maxima = compiled(_sum_norm_and_maxima)(x, residual, self.weight, self.eps)
        return stream, with_row_maxima(normed, maxima)


class FusedLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's TransformerLayer for training without dropout and biases; both of its norms are a SumRMSNorm."""

    def _sum_and_norm(self, norm: SumRMSNorm, *summands: Tensor) -> tuple[Tensor, Tensor, CheckpointWithoutOutput | None]:
        """Return the sum, the same normalized, and what drops the latter after its use where it is recomputed.

        The norm is called as a module, so that hooks which wait for gathered weights fire.
        """
        if not self.recompute_input_layernorm:
            return *norm(*summands), None
        stream = summands[0] if len(summands) == 1 else summands[0] + summands[1]
        dropped = CheckpointWithoutOutput()
        return stream, dropped.checkpoint(lambda x: norm(x)[1], stream), dropped

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Attention and feed-forward block, each around the residual stream; shape (tokens, sequences, hidden) in and out."""
        stream, normed, dropped = self._sum_and_norm(self.input_layernorm, hidden_states)
        attention, _none = self.self_attention(normed, attention_mask=attention_mask)
        if dropped:
            dropped.discard_output_and_register_recompute(attention)
        stream, normed, dropped = self._sum_and_norm(self.pre_mlp_layernorm, attention, stream)
        if self.recompute_mlp:
            feed_forward, _none = tensor_parallel.checkpoint(self.mlp, False, normed)
        else:
            feed_forward, _none = self.mlp(normed)
        if dropped:
            dropped.discard_output_and_register_recompute(feed_forward)
        return feed_forward + stream, None


def _sum_and_norm(branch: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    stream = branch + residual
    return stream, rms_norm(stream, weight, epsilon)


def _maxima(rows: Tensor) -> Tensor:
    """Shape (..., columns) -> (...)."""
    return rows.detach().abs().amax(dim=-1)


def _norm_and_maxima(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    normed = rms_norm(x, weight, epsilon)
    return normed, _maxima(normed)


def _sum_norm_and_maxima(branch: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    stream, normed = _sum_and_norm(branch, residual, weight, epsilon)
    return stream, normed, _maxima(normed)


# SwiGLU's feed-forward block with an activation whose backward pass is one kernel at the memory's bandwidth: a compiled gradient
# that ends in a concatenation stays well below it, so the two halves are separate outputs, views of one buffer.


class SwiGLUMLP(MLP):  # type: ignore[misc]
    """Megatron's MLP for gated layers without biases."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Gate and up projection in one product, activation, down projection; shape (tokens, sequences, hidden) in and out."""
        joint, _none = self.linear_fc1(hidden_states)
        active, maxima = SwiGLU.apply(joint, self.linear_fc2.products_type.uses_row_maxima)  # type: ignore[no-untyped-call]
        if maxima is not None:
            active = with_row_maxima(active, maxima)
        out, _none = self.linear_fc2(active)
        return out, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) x up (arXiv:2002.05202)."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor, finds_maxima: bool) -> tuple[Tensor, Tensor | None]:
        """Shape (..., 2 x ffn), gate before up -> (..., ffn), and its rows' largest magnitudes, (...), for products in 8 bits."""
        ctx.save_for_backward(joint)
        ctx.finds_maxima = finds_maxima
        if not finds_maxima:
            return compiled(swiglu)(joint), None
        out, maxima = compiled(_swiglu_and_maxima)(joint)
        ctx.mark_non_differentiable(maxima)
        return out, maxima

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
        """Write both halves of the gradient into one buffer, and leave its rows' maxima with it where they are wanted."""
        (joint,) = ctx.saved_tensors
        out = torch.empty_like(joint)
        # As matrices: torch.compile can then tell that the two views do not overlap, and writes both in one kernel.
        operands = gradient.flatten(0, -2), joint.flatten(0, -2), *out.view(-1, out.shape[-1]).chunk(2, dim=-1)
        if ctx.finds_maxima:
            return with_row_maxima(out, compiled(_swiglu_backward_and_maxima)(*operands)), None
        compiled(swiglu_gradient)(*operands)
        return out, None


def _swiglu_and_maxima(joint: Tensor) -> tuple[Tensor, Tensor]:
    out = swiglu(joint)
    return out, _maxima(out)


def _swiglu_backward_and_maxima(gradient: Tensor, joint: Tensor, gate_gradient: Tensor, up_gradient: Tensor) -> Tensor:
    halves = [value.to(joint.dtype) for value in swiglu_gradients(gradient, joint)]
    gate_gradient.copy_(halves[0])
    up_gradient.copy_(halves[1])
    return torch.maximum(_maxima(halves[0]), _maxima(halves[1]))


# The spec that puts all of it together.


Linear = tuple[type[ColumnLinear], type[RowLinear]]


def block_spec(
    shape: ModelShape, experts: list[bool], linear: Linear, rotary: Callable[[int], Rotation] | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of the layers of one pipeline stage, or chunk of one under virtual pipelining, on torch only.

    `experts` says whether each layer has some; `rotary` is tokens -> cosines and sines, None leaves positions to Megatron.
    """
    compat.recompute_norms_without_fp8()
    specs = {kind: _layer_spec(shape, linear, rotary, experts=kind) for kind in set(experts)}
    norm = RMSNorm if shape.norm == "rmsnorm" else LayerNorm
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in experts], layer_norm=norm)


def transformer_engine_spec(shape: ModelShape, experts: list[bool]) -> TransformerBlockSubmodules:
    """Return the same of Transformer Engine's layers, in place of ours."""
    from megatron.core.extensions.transformer_engine import TENorm

    specs = {
        kind: get_gpt_layer_with_transformer_engine_spec(
            num_experts=shape.experts if kind else None,
            moe_grouped_gemm=kind,
            qk_layernorm=shape.qk_norm or shape.kv_lora_rank is not None,
            multi_latent_attention=shape.kv_lora_rank is not None,
        )
        for kind in set(experts)
    }
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in experts], layer_norm=TENorm)


def expert_layers(config: TransformerConfig, shape: ModelShape, virtual_stage: int | None) -> list[bool]:
    """Return for each layer of a pipeline stage, or chunk of one, whether it has experts."""
    first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=virtual_stage))
    return [shape.experts is not None and number >= shape.dense_first_layers for number in numbers]


def _layer_spec(shape: ModelShape, linear: Linear, rotary: Callable[[int], Rotation] | None, *, experts: bool) -> ModuleSpec:
    latent, norm = shape.kv_lora_rank is not None, RMSNorm if shape.norm == "rmsnorm" else LayerNorm
    if latent:
        compat.do_without_te_in_latent_attention()
    layer = get_gpt_layer_local_spec(
        normalization="RMSNorm" if shape.norm == "rmsnorm" else None,
        qk_layernorm=shape.qk_norm,
        multi_latent_attention=latent,
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    parts.sharded_state_dict_keys_map = {}
    if rotary:
        parts.self_attention.module = RotarySelfAttention
        parts.self_attention.params["rotary"] = rotary
    attention, mlp = parts.self_attention.submodules, compat.feed_forward_parts(parts.mlp)
    feed_forward: type[MLP] = MLP
    if shape.gated and not shape.linear_bias:
        feed_forward = SwiGLUMLP
        parts.mlp = compat.feed_forward_spec(SwiGLUMLP, mlp)
    if shape.norm == "rmsnorm" and not shape.linear_bias:
        fused_norm = SumRMSNormMaxima if linear[0].products_type.uses_row_maxima else SumRMSNorm
        layer.module, parts.input_layernorm, parts.pre_mlp_layernorm = FusedLayer, fused_norm, fused_norm
    attention.core_attention = SDPACoreAttention
    column, attention.linear_proj = mlp.linear_fc1, mlp.linear_fc2 = linear
    if latent:  # the narrow projections stay Megatron's until LatentAttention replaces them: no other module is accepted
        attention.linear_q_proj = attention.linear_q_up_proj = attention.linear_kv_up_proj = column
        parts.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = norm
    else:
        attention.linear_qkv = column
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm if rotary is None else NormScale
    if experts:
        parts.mlp = compat.experts_spec(ExpertsLayer, {"shared": mlp, "feed_forward": feed_forward})
    return layer
