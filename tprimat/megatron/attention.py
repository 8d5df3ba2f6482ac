"""Self-attention: the joint projection split and rotated in one kernel, latent attention, core attention, context parallelism."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention.bias import causal_lower_right

from tprimat.megatron import compat
from tprimat.megatron.compat import CudnnAttention, compiled
from tprimat.megatron.linear import ColumnParallelMatmul, LinearProducts, context_of
from tprimat.megatron.wgrad import let_accumulate

# Queries, keys and values, split from their joint projection and rotated by position, in one kernel each instead of
# Megatron-Core's chain of small ones, each of which reads and writes all queries.

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each (tokens, 1, 1, head_dim), both halves alike, fp32: a GPU reads them faster than it computes them."""


class RotarySelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's SelfAttention in a model that is configured without positions, because this class applies them."""

    def __init__(self, config: TransformerConfig, *arguments: Any, rotary: Callable[[int], Rotation], **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.rotary = rotary

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Project, split and rotate hidden states (tokens of this rank, sequences, hidden): three of (..., heads, head_dim)."""
        joint, _ = self.linear_qkv(hidden_states)
        groups = joint.unflatten(-1, (self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head))
        scales: tuple[Tensor | None, ...] = (None, None)
        epsilon = 0.0
        if isinstance(self.q_layernorm, NormScale):
            # Called as modules, so that hooks which wait for gathered weights fire.
            scales, epsilon = (self.q_layernorm(None), self.k_layernorm(None)), self.q_layernorm.eps
        rotation = self.rotary(joint.shape[0] * self.config.context_parallel_size)
        return SplitAndRotate.apply(groups, *scales, epsilon, *rotation)  # type: ignore[no-untyped-call]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions (RoFormer, arXiv:2104.09864), dimension i paired with i + head_dim / 2, in fp32.

    `x` is (tokens, sequences, heads, head_dim); for `cos` and `sin` see Rotation. A negated `sin` rotates back.
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

        `groups` is (tokens, sequences, key/value heads, queries of one of them + 2, head_dim), a scale (head_dim,) or None.
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


# Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1); every tensor rank has the narrow projections whole.
# Megatron-Core's local modules split them, and the gradient of the keys' rotary part, which all heads share, then misses the
# heads of other ranks. Under sequence parallelism each rank projects its own tokens, and the rotary part's gradient is summed
# over ranks.


class WholeLinear(torch.nn.Module):
    """A linear layer without bias that every tensor rank has whole, for its own tokens.

    Of Megatron's module for the same layer (`split`) only what is not split is used.
    """

    def __init__(self, config: TransformerConfig, split: Any, inputs: int, outputs: int, products: LinearProducts) -> None:
        super().__init__()
        old = split.weight
        self.weight = Parameter(torch.empty(outputs, inputs, dtype=old.dtype, device=old.device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.alone = replace(context_of(split), ranks=1, sequence_parallel=False, exchange=None, products=products)
        if self.alone.fused_wgrad:
            let_accumulate(self.weight)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        """Multiply, shape (tokens of this rank, sequences, in) -> (tokens of this rank, sequences, out)."""
        return ColumnParallelMatmul.apply(rows, self.weight, None, self.alone), None  # type: ignore[no-untyped-call]


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's MLASelfAttention with whole narrow projections; tensor parallelism needs sequence parallelism."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        narrow = {"linear_kv_down_proj": config.kv_lora_rank + config.qk_pos_emb_head_dim}
        if config.q_lora_rank is not None:
            narrow["linear_q_down_proj"] = config.q_lora_rank
        products = getattr(self.linear_proj, "products_type", LinearProducts)
        for name, outputs in narrow.items():
            setattr(self, name, WholeLinear(config, getattr(self, name), config.hidden_size, outputs, products()))

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Take what the spec names: since 0.19 Megatron's own choice of norms knows only Transformer Engine's."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


# Core attention.


class SDPACoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by torch's scaled_dot_product_attention: cuDNN, Flash or AOTriton on a GPU, a fused kernel on a CPU."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.backend: str | None = None
        """Name of the kernels that torch selected; None before the first call."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend: (tokens, sequences, heads or key/value heads here, head_dim) -> (tokens, sequences, heads x head_dim)."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if self.config.context_parallel_size > 1:
            self.backend = "cudnn_attention in two parts" if kernels_for(q, v) else None
            out = attention_over_gathered_kv(query, key, value)
        else:
            grouped = query.shape[2] != key.shape[2]
            self.backend = self.backend or compat.attention_backend_name(q, k, v, grouped=grouped)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


# Context parallelism by gathering keys and values, as Llama 3 was trained (arXiv:2407.21783, section 3.3.2). A sequence is cut
# into twice as many pieces as there are ranks; rank r keeps piece r and its mirror image, so that all have the same work under
# the causal mask. torch gives cuDNN no mask for what comes before a piece and the causal piece at once: each is attended to
# alone, and the results are joined by the sums of their rows (arXiv:2310.01889). Given both joined, the gradients of the parts
# add up.


def own_pieces(tokens: Tensor) -> Tensor:
    """Return this rank's part of sequences of shape (sequences, tokens): its piece, then the mirror image."""
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return tokens
    pieces = tokens.chunk(2 * ranks, dim=1)
    rank = parallel_state.get_context_parallel_rank()
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]], dim=1)


def attention_over_gathered_kv(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally from this rank's two pieces to everything before them.

    Shapes: (tokens of this rank, sequences, heads or key/value heads, head_dim) -> (sequences, heads, tokens, head_dim).
    """
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    keys, values = (_gather_sequence(part, ranks) for part in (key, value))
    halves = query.permute(1, 2, 0, 3).chunk(2, dim=2)
    length = halves[0].shape[2]
    outputs = []
    for half, piece in zip(halves, (rank, 2 * ranks - 1 - rank), strict=True):
        seen = (piece + 1) * length
        outputs.append(attend(half, keys[:, :, :seen], values[:, :, :seen]))
    return torch.cat(outputs, dim=2)


def _gather_sequence(part: Tensor, ranks: int) -> Tensor:
    """Gather all ranks' keys or values in the order of the sequence, shape (sequences, heads, tokens, head_dim)."""
    gathered = gather_from_sequence_parallel_region(part, group=parallel_state.get_context_parallel_group())
    pieces = gathered.chunk(2 * ranks, dim=0)  # rank 0's two, rank 1's two, ...
    in_order = [pieces[2 * number] if number < ranks else pieces[2 * (2 * ranks - 1 - number) + 1] for number in range(2 * ranks)]
    return torch.cat(in_order).permute(1, 2, 0, 3)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally, where the last query belongs to the last key; result as query.

    Shapes: (sequences, heads, tokens, head_dim); of key and value (sequences, key/value heads, tokens seen, head_dim).
    """
    kernels = kernels_for(query, value)
    if kernels is None:
        mask, grouped = causal_lower_right(query.shape[2], key.shape[2]), query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
    return AttentionOfPiece.apply(query, key, value, kernels)  # type: ignore[no-any-return, no-untyped-call]


class AttentionOfPiece(torch.autograd.Function):
    """Attention to what comes before a piece, without a mask, and to the piece itself, with the causal one, joined."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernels: CudnnAttention) -> Tensor:
        """See attend."""
        before = key.shape[2] - query.shape[2]
        out, sums, own = kernels.forward(query, key[:, :, before:], value[:, :, before:], causal=True)
        ctx.kernels, ctx.before, ctx.states = kernels, before, (own,)
        if before:
            earlier, earlier_sums, state = kernels.forward(query, key[:, :, :before], value[:, :, :before], causal=False)
            out, sums = (compiled(join) if query.is_cuda else join)(out, sums, earlier, earlier_sums)
            ctx.states = (own, state)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Add up the gradients of both parts."""
        query, key, value, out, sums = ctx.saved_tensors
        before, backward = ctx.before, ctx.kernels.backward
        if gradient.stride() != out.stride():
            gradient = torch.empty_like(out).copy_(gradient)
        own, earlier = ((query, key[:, :, part], value[:, :, part]) for part in (slice(before, None), slice(before)))
        of_query, of_key, of_value = backward(gradient, own, (out, sums), ctx.states[0], causal=True)
        if before:
            more, earlier_key, earlier_value = backward(gradient, earlier, (out, sums), ctx.states[1], causal=False)
            of_query = of_query + more
            of_key, of_value = torch.cat((earlier_key, of_key), dim=2), torch.cat((earlier_value, of_value), dim=2)
        return of_query, of_key, of_value, None


def join(out: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over the keys of two parts, (sequences, heads, tokens, head_dim), and the logs of its rows' sums, fp32."""
    total = torch.logaddexp(sums, other_sums)
    joined = out.float() * torch.exp(sums - total) + other.float() * torch.exp(other_sums - total)
    return joined.to(out.dtype), total


def kernels_for(query: Tensor, value: Tensor) -> CudnnAttention | None:
    """Return the kernels that attend to one part at a time here; None where there are none, or they are switched off."""
    if not query.is_cuda or query.shape[3] != value.shape[3] or query.dtype not in {torch.bfloat16, torch.float16}:
        return None
    usable = torch.version.hip is None and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return CudnnAttention() if usable else None
