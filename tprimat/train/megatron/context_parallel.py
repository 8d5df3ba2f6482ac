"""Context parallelism by gathering keys and values, as Llama 3 was trained (arXiv:2407.21783, section 3.3.2).

A sequence is cut into twice as many pieces as there are ranks; rank r keeps piece r and its mirror image, so that under the
causal mask all ranks have the same work. Each rank gathers all keys and values and attends from its own two pieces.
"""

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


def own_pieces(tokens: Tensor) -> Tensor:
    """This rank's part of sequences of shape (sequences, tokens): its piece and the mirror image, one behind the other."""
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return tokens
    pieces = tokens.chunk(2 * ranks, dim=1)
    rank = parallel_state.get_context_parallel_rank()
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]], dim=1)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of this rank's two pieces to everything before them.

    Args:
        query: shape (tokens of this rank, sequences, heads, head_dim).
        key: shape (tokens of this rank, sequences, key/value heads, head_dim).
        value: as key.

    Returns:
        shape (sequences, heads, tokens of this rank, head_dim).
    """
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    keys, values = (_everything(part, ranks) for part in (key, value))
    halves = query.permute(1, 2, 0, 3).chunk(2, dim=2)
    length = halves[0].shape[2]
    grouped = query.shape[2] != key.shape[2]
    outputs = []
    for half, piece in zip(halves, (rank, 2 * ranks - 1 - rank), strict=True):
        seen = (piece + 1) * length
        mask = causal_lower_right(length, seen)
        outputs.append(
            F.scaled_dot_product_attention(half, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, enable_gqa=grouped)
        )
    return torch.cat(outputs, dim=2)


def _everything(part: Tensor, ranks: int) -> Tensor:
    """All ranks' keys or values in the order of the sequence, shape (sequences, heads, tokens, head_dim)."""
    gathered = gather_from_sequence_parallel_region(part, group=parallel_state.get_context_parallel_group())
    pieces = gathered.chunk(2 * ranks, dim=0)  # rank 0's two, rank 1's two, ...
    in_order = [pieces[2 * number] if number < ranks else pieces[2 * (2 * ranks - 1 - number) + 1] for number in range(2 * ranks)]
    return torch.cat(in_order).permute(1, 2, 0, 3)
