"""Weight gradients (wgrad) added straight into Megatron's fp32 buffer by the operation that computes them.

cuBLAS multiplies bf16 into fp32 and adds what is there (`beta = 1`), which torch reaches through addmm's `out_dtype`;
Megatron-Core alone would need Apex's extension. The first product of a step overwrites (`beta = 0`), so that the buffer need not
be cleared. The word embedding adds only the rows of words that occurred. Autograd needs a tensor in return: it gets an empty one,
and `grad_added_to_main_grad` tells Megatron to ignore it. A weight that got no gradient in a step would keep the last step's, so
`check_all_received` refuses to go on.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.nn import Parameter

from tprimat.megatron import compat
from tprimat.megatron.compat import compiled


def accumulate_wgrad(total: Tensor, gradient: Tensor, rows: Tensor, factor: float = 1.0, *, overwrite: bool = False) -> None:
    """Total += factor x gradient.T @ rows, or total = with `overwrite`, which does not read the old contents.

    Shapes: (out, in) in fp32, (n, out) and (n, in). The factor is applied in fp32.
    """
    beta = 0 if overwrite else 1
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), rows, beta=beta, alpha=factor)
    elif gradient.is_cuda:
        torch.addmm(total, gradient.t(), rows, beta=beta, alpha=factor, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(gradient.t().to(total.dtype), rows.to(total.dtype), beta=beta, alpha=factor)


def add_gradient(total: Tensor, gradient: Tensor, *, overwrite: bool) -> None:
    """Total += gradient, or total = with `overwrite`; total is fp32. Compiled on a GPU: torch is slow with two dtypes."""
    function = _write if overwrite else _add
    (compiled(function) if total.is_cuda else function)(total, gradient)


def _add(total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient)


def _write(total: Tensor, gradient: Tensor) -> None:
    total.copy_(gradient)


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


def let_accumulate(weight: Parameter) -> None:
    """Mark a weight whose gradient its own operation adds to the buffer; the first of a step overwrites."""
    weight.accumulates = True  # type: ignore[attr-defined]


def claim_first_gradient(weight: Parameter) -> bool:
    """Whether the coming gradient is the first since `begin_step`, and so overwrites. Ask once for each gradient."""
    first: bool = getattr(weight, "next_gradient_overwrites", False)
    if first:
        weight.next_gradient_overwrites = False  # type: ignore[attr-defined]
    return first


def overwritten_weights(chunk: DistributedDataParallel) -> list[Parameter]:
    """Return the weights of a chunk whose first gradient of a step overwrites, and which nothing clears from now on."""
    weights = [weight for weight in chunk.parameters() if getattr(weight, "accumulates", False)]
    compat.keep_gradients(chunk, set(weights))
    return weights


def begin_step(chunks: Iterable[DistributedDataParallel], overwritten: Sequence[Parameter]) -> None:
    """Prepare the gradient buffers of a model's chunks for a step: the first gradient of an `overwritten` weight overwrites."""
    for weight in overwritten:
        weight.next_gradient_overwrites = True  # type: ignore[attr-defined]
    for chunk in chunks:
        chunk.zero_grad_buffer()


def check_all_received(overwritten: Sequence[Parameter]) -> None:
    """Raise a RuntimeError if a weight got no gradient in a backward pass: one of an earlier step would be taken for it."""
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
