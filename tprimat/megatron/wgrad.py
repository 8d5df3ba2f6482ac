"""Weight gradients (wgrad) added straight into Megatron's fp32 buffer by the operation that computes them.

The problem: a weight's gradient is the sum over the micro-batches of a step, taken in fp32. Autograd writes each micro-batch's
gradient in bf16, and a second kernel reads it, converts it, and reads and writes the buffer: 2 + 2 + 4 + 4 bytes per weight
beside the product itself. Before each step the buffer is cleared, which writes another 4 bytes.

What is done:
- Matrices: cuBLAS multiplies bf16 into an fp32 accumulator and adds what is there (`beta = 1`), so that the product itself
  updates the buffer. torch reaches it through addmm's `out_dtype`; Megatron-Core alone would need Apex's extension for it.
- The first product of a step overwrites (`beta = 0`), so that the buffer need not be cleared, nor its zeros be read.
- Word embedding: only the rows of words that occurred have a gradient. torch makes a dense one of the whole vocabulary, 6 GB
  of traffic for 8,192 tokens' worth of rows; here those rows alone are added.

Why it is right: the sums are the same, in another order at most, and more precise, since no micro-batch's gradient is rounded to
bf16. Autograd needs a tensor in return: it gets an empty one, and `grad_added_to_main_grad` tells Megatron to ignore it. A weight
that got no gradient in a step would keep the last step's, so `check_all_received` refuses to go on.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.nn import Parameter

from tprimat.megatron import compat


def accumulate_wgrad(total: Tensor, gradient: Tensor, rows: Tensor, factor: float = 1.0, *, overwrite: bool = False) -> None:
    """Total += factor x gradient.T @ rows.

    Args:
        total: shape (out, in), fp32.
        gradient: shape (n, out).
        rows: shape (n, in), dtype as gradient.
        factor: applied in fp32.
        overwrite: total = instead; its old contents are not read.
    """
    beta = 0 if overwrite else 1
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), rows, beta=beta, alpha=factor)
    elif gradient.is_cuda:
        torch.addmm(total, gradient.t(), rows, beta=beta, alpha=factor, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(gradient.t().to(total.dtype), rows.to(total.dtype), beta=beta, alpha=factor)


def accumulates_on(device: torch.device) -> bool:
    """Whether this torch and this device multiply bf16 into fp32: tried on a small product and compared with one in fp32."""
    generator = torch.Generator(device).manual_seed(0)
    gradient, rows = (torch.randn(64, 32, device=device, generator=generator).bfloat16() for _ in range(2))
    total, expected = torch.full((32, 32), torch.nan, device=device), gradient.float().t() @ rows.float()
    try:
        accumulate_wgrad(total, gradient, rows, overwrite=True)
        accumulate_wgrad(total, gradient, rows)
    except (RuntimeError, TypeError):  # an older torch has no such product, or not for this device
        return False
    return torch.allclose(total, 2 * expected, rtol=1e-3, atol=1e-3)


# From step to step: which gradients begin anew.


def claim_first_gradient(weight: Parameter) -> bool:
    """Whether the coming gradient is the first since `begin_step`, and so overwrites. Ask once for each gradient."""
    first: bool = getattr(weight, "next_gradient_overwrites", False)
    if first:
        weight.next_gradient_overwrites = False  # type: ignore[attr-defined]
    return first


def overwritten_weights(chunk: DistributedDataParallel) -> list[Parameter]:
    """Return the weights of a chunk of the model whose first gradient of a step overwrites.

    Their modules name them in a property `overwritten_weight`.
    """
    found = [getattr(part, "overwritten_weight", None) for part in chunk.modules()]
    return [weight for weight in found if weight is not None and hasattr(weight, "main_grad")]


def begin_step(chunk: DistributedDataParallel, overwritten: Sequence[Parameter]) -> None:
    """Prepare the gradient buffer of a chunk for a step: the first gradient of an `overwritten` weight overwrites."""
    for weight in overwritten:
        weight.next_gradient_overwrites = True  # type: ignore[attr-defined]
    compat.zero_grad_buffer_except(chunk, set(overwritten))


def check_all_received(overwritten: Sequence[Parameter]) -> None:
    """Check after the backward pass that no gradient of an earlier step is taken for one of this step.

    Raises:
        RuntimeError: one of the weights got none.
    """
    if any(getattr(weight, "next_gradient_overwrites", False) for weight in overwritten):
        raise RuntimeError("A weight got no gradient in this step; run with engine_options.accumulate_weight_gradients: false.")


# The word embedding.


class AccumulatingEmbedding(tensor_parallel.VocabParallelEmbedding):  # type: ignore[misc]
    """VocabParallelEmbedding that adds the gradients of the rows it looked up; not for a weight shared with the output layer."""

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
        """Add to each row that occurred, once, the sum of its gradients; adding to none twice makes the result deterministic."""
        places, weight = ctx.saved_tensors
        flat = places.flatten()
        ordered, order = flat.sort()
        number = F.pad((ordered[1:] != ordered[:-1]).cumsum(0), (1, 0))
        """Number of the distinct row at each place of the sorted order."""
        distinct = torch.zeros_like(flat).scatter_(0, number, ordered)
        numbers = torch.empty_like(number).scatter_(0, order, number)
        summed = torch.ops.aten.embedding_dense_backward(gradient.flatten(0, -2), numbers, flat.numel(), -1, False)
        weight.main_grad.index_add_(0, distinct, summed.to(weight.main_grad.dtype))
        weight.grad_added_to_main_grad = True
        return None, torch.empty_like(weight)


def use_accumulating_embedding(model: torch.nn.Module) -> None:
    """Turn the word embedding that GPTModel's constructor made into an AccumulatingEmbedding."""
    for part in model.modules():
        if type(part) is tensor_parallel.VocabParallelEmbedding:
            part.__class__ = AccumulatingEmbedding
