"""Context parallelism by gathering keys and values, as Llama 3 was trained (arXiv:2407.21783, section 3.3.2).

A sequence is cut into twice as many pieces as there are ranks. Rank r keeps piece r and its mirror image, so that all ranks have
the same work under the causal mask, and attends from them to all keys and values. torch gives cuDNN no mask for what comes before
a piece and the causal piece at once, so each is attended to alone and the two results are joined by the sums of their rows, as in
a ring (arXiv:2310.01889). The backward pass needs no join: given the joined result and sums, the gradients of the two parts add
up.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from tprimat.megatron.compat import CpuAttention, CudnnAttention, compiled


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

    Args:
        query: shape (tokens of this rank, sequences, heads, head_dim).
        key: shape (tokens of this rank, sequences, key/value heads, head_dim).
        value: as key.

    Returns:
        shape (sequences, heads, tokens of this rank, head_dim).
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

    Args:
        query: shape (sequences, heads, tokens, head_dim).
        key: shape (sequences, key/value heads, tokens seen, head_dim); at least as many tokens.
        value: as key.
    """
    kernels = kernels_for(query, value)
    if kernels is None:
        return _attend_by_mask(query, key, value)
    return AttentionOfPiece.apply(query, key, value, kernels)  # type: ignore[no-any-return, no-untyped-call]


def _attend_by_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = causal_lower_right(query.shape[2], key.shape[2])
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


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
    """Return attention over the keys of two parts and its sums.

    Results have the shape (sequences, heads, tokens, head_dim), logarithms of the sums of their rows (..., tokens, 1), fp32.
    """
    total = torch.logaddexp(sums, other_sums)
    joined = out.float() * torch.exp(sums - total) + other.float() * torch.exp(other_sums - total)
    return joined.to(out.dtype), total


def kernels_for(query: Tensor, value: Tensor) -> CudnnAttention | None:
    """Return the kernels that attend to one part at a time here; None where there are none, or they are switched off."""
    if query.shape[3] != value.shape[3]:
        return None
    if query.device.type == "cpu":
        return CpuAttention()
    usable = torch.version.hip is None and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return CudnnAttention() if usable and query.dtype in (torch.bfloat16, torch.float16) else None
