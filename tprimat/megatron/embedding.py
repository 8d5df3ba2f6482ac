"""Word embedding whose gradient touches only the rows of the words that occurred, straight in Megatron's fp32 buffer.

torch makes a dense gradient of the whole vocabulary in each micro-batch, which is then added to the buffer: 6 GB of
traffic for 8,192 tokens' worth of rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor
from torch.nn import Parameter


class AccumulatingEmbedding(tensor_parallel.VocabParallelEmbedding):  # type: ignore[misc]
    """VocabParallelEmbedding with that gradient; not for a weight that the output layer shares."""

    def forward(self, words: Tensor) -> Tensor:
        """Look up, shape (sequences, tokens) -> (sequences, tokens, hidden), or (tokens of this rank, sequences, hidden)."""
        ranks = self.tp_group.size()
        elsewhere = (words < self.vocab_start_index) | (words >= self.vocab_end_index)
        places = (words - self.vocab_start_index).masked_fill(elsewhere, 0) if ranks > 1 else words
        rows = Lookup.apply(places, self.weight)  # type: ignore[no-untyped-call]
        if ranks > 1:
            rows = rows.masked_fill(elsewhere[..., None], 0)
        if self.reduce_scatter_embeddings:
            rows = rows.transpose(0, 1).contiguous()
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(rows, group=self.tp_group)  # type: ignore[no-any-return]
        return tensor_parallel.reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)  # type: ignore[no-any-return]


class Lookup(torch.autograd.Function):
    """weight[places]."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, weight: Parameter) -> Tensor:
        """Shape (...), row numbers -> (..., hidden)."""
        ctx.save_for_backward(places, weight)
        return F.embedding(places, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Add each row that occurred once, with the sum of its gradients: no row is added to twice, so the order is settled."""
        places, weight = ctx.saved_tensors
        flat = places.flatten()
        ordered, order = flat.sort()
        number = F.pad((ordered[1:] != ordered[:-1]).cumsum(0), (1, 0))
        """Of the distinct row that stands at each place of the order."""
        distinct = torch.zeros_like(flat).scatter_(0, number, ordered)
        numbers = torch.empty_like(number).scatter_(0, order, number)
        summed = torch.ops.aten.embedding_dense_backward(gradient.flatten(0, -2), numbers, flat.numel(), -1, False)
        weight.main_grad.index_add_(0, distinct, summed.to(weight.main_grad.dtype))
        weight.grad_added_to_main_grad = True
        return None, torch.empty_like(weight)


def accumulate_in_place(model: torch.nn.Module) -> None:
    """Let a GPTModel's word embedding, which its constructor has made, be one of these."""
    for part in model.modules():
        if type(part) is tensor_parallel.VocabParallelEmbedding:
            part.__class__ = AccumulatingEmbedding
