"""The matrix products of a layer, split over tensor ranks: what Megatron-Core's linear modules do, with our choice of kernels.

For an input X (n x in), a weight W (out x in) and the output's gradient dY, the three products are Y = X @ W.T, dgrad dX = dY @ W
and wgrad dW = dY.T @ X. A column-parallel layer has some rows of a weight on each rank, so its outputs are split; a row-parallel
one has columns (Megatron-LM, arXiv:1909.08053). Under sequence parallelism (arXiv:2205.05198) activations between the pairs are
split along the tokens:

                      forward                       backward
    column-parallel   gather X, multiply            multiply, scatter the sum of dX
    row-parallel      multiply, scatter the sum     gather dY, multiply

Megatron-Core's modules gather X once more in the backward pass, and wait for each exchange of the forward pass. These keep the
gathered X, add wgrad to Megatron's fp32 buffer (wgrad.py), and can overlap exchanges with products (tp_overlap.py).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn import Parameter

from tprimat.megatron.tp_overlap import Exchange, Multiply, exchange_of
from tprimat.megatron.wgrad import accumulate_wgrad, claim_first_gradient, let_accumulate


def with_row_maxima(rows: Tensor, maxima: Tensor) -> Tensor:
    """Leave with a tensor the largest magnitude of each of its rows, which the kernel that made it has found on the way."""
    rows.row_maxima = maxima  # type: ignore[attr-defined]
    return rows


def row_maxima(rows: Tensor) -> Tensor | None:
    """Return what with_row_maxima left; None for tensors of other kernels, and for copies."""
    return getattr(rows, "row_maxima", None)


def _as_matrix(rows: Tensor) -> Tensor:
    """Flatten shape (tokens, sequences, columns) to (tokens x sequences, columns), with the maxima."""
    flat, maxima = rows.flatten(0, 1), row_maxima(rows)
    return flat if maxima is None else with_row_maxima(flat, maxima)


Operand = tuple[Tensor, ...]
"""Rows, or the output's gradient, in the form that products take. Its last two tensors are what wgrad takes."""


class LinearProducts:
    """The three products of one weight, in its dtype. All rows are matrices, shape (n, in) or (n, out)."""

    uses_row_maxima: ClassVar[bool] = False
    """Whether tensors should come with the largest magnitude of each row."""
    sums_in_fp32_only: ClassVar[bool] = False
    """Whether `total` of wgrad must be fp32, instead of the weight's dtype."""

    def operand(self, x: Tensor, *, gradient: bool = False, group: dist.ProcessGroup | None = None) -> Operand:
        """Convert rows, or the output's gradient. With a group, each of its ranks has some of the rows: see `whole`."""
        return (x,)

    def whole(self, shard: Operand, full: Tensor) -> Operand:
        """Return the operand of all ranks' rows, given that of this rank's, and its first tensor gathered."""
        return (full,)

    def into(self, operand: Operand, weight: Tensor, *, gradient: bool = False) -> Multiply:
        """Return what multiplies some of an operand's rows with weight.T, or a gradient's with weight, into given memory."""
        matrix = weight if gradient else weight.t()
        return lambda rows, out: torch.mm(rows, matrix, out=out)

    def forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Operand]:
        """Return rows @ weight.T + bias, and what the backward pass needs of the rows."""
        return F.linear(rows, weight, bias), (rows,)

    def dgrad(self, prepared: Operand, weight: Tensor) -> Tensor:
        """Return gradient @ weight."""
        return prepared[0] @ weight

    def wgrad(self, total: Tensor, prepared: Operand, kept: Operand, *, overwrite: bool) -> None:
        """Total += gradient.T @ rows, or total = with `overwrite`."""
        accumulate_wgrad(total, prepared[0], kept[0], overwrite=overwrite)


@dataclass(frozen=True)
class TensorParallelContext:
    """The ranks that share one weight, and how they exchange activations."""

    group: dist.ProcessGroup
    ranks: int
    sequence_parallel: bool
    exchange: Exchange | None
    """Overlaps exchanges with products; None: a collective before or after each product."""
    fused_wgrad: bool
    products: LinearProducts

    def gathered(self, rows: Tensor) -> Tensor:
        """Return all ranks' rows, shape (ranks x n, ...)."""
        out = rows.new_empty((self.ranks * rows.shape[0], *rows.shape[1:]))
        dist.all_gather_into_tensor(out, rows.contiguous(), group=self.group)
        return out

    def reduce_scattered(self, rows: Tensor, *, asynchronous: bool = False) -> tuple[Tensor, dist.Work | None]:
        """Return this rank's rows of the sum over ranks, shape (n / ranks, ...)."""
        out = rows.new_empty((rows.shape[0] // self.ranks, *rows.shape[1:]))
        return out, dist.reduce_scatter_tensor(out, rows.contiguous(), group=self.group, async_op=asynchronous)


def _wgrad(weight: Parameter, tp: TensorParallelContext, prepared: Operand, kept: Operand) -> Tensor:
    """Add wgrad to the fp32 buffer, if Megatron has one, and return an empty tensor for autograd; otherwise return wgrad."""
    total = getattr(weight, "main_grad", None)
    if tp.fused_wgrad and total is not None:
        tp.products.wgrad(total, prepared, kept, overwrite=claim_first_gradient(weight))
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.empty_like(weight)
    fresh = torch.empty_like(weight, dtype=torch.float32 if tp.products.sums_in_fp32_only else weight.dtype)
    tp.products.wgrad(fresh, prepared, kept, overwrite=True)
    return fresh.to(weight.dtype)


def _gathered_product(x: Tensor, weight: Tensor, tp: TensorParallelContext, *, gradient: bool) -> tuple[Tensor, Operand]:
    """Return the product of all ranks' rows with weight.T, or of their gradients with weight, and the operand of all."""
    assert tp.exchange is not None
    shard = tp.products.operand(_as_matrix(x.contiguous()), gradient=gradient, group=tp.group)
    out = x.new_empty((tp.ranks * shard[0].shape[0], weight.shape[1 if gradient else 0]))
    full = tp.exchange.gather_and_multiply(shard[0], tp.products.into(shard, weight, gradient=gradient), out)
    return out, tp.products.whole(shard, full)


class ColumnParallelMatmul(torch.autograd.Function):
    """rows @ weight.T + bias, where each rank computes some of the outputs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Parameter, bias: Tensor | None, tp: TensorParallelContext) -> Tensor:
        """Gather the rows under sequence parallelism, then multiply.

        Shapes: rows (tokens, sequences, in), weight (out of this rank, in), bias (out of this rank,).
        """
        ctx.tp, ctx.has_bias = tp, bias is not None
        if tp.exchange:
            product, kept = _gathered_product(rows, weight, tp, gradient=False)
            product = product if bias is None else product + bias
        else:
            full = tp.gathered(rows) if tp.sequence_parallel else rows
            product, kept = tp.products.forward(_as_matrix(full), weight, bias)
        ctx.save_for_backward(weight, *kept[-2:])
        return product.view(-1, rows.shape[1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Compute dgrad, and sum it over ranks while wgrad is computed."""
        weight, *kept = ctx.saved_tensors
        tp, products, work = ctx.tp, ctx.tp.products, None
        flat = _as_matrix(gradient)
        bias = flat.sum(dim=0) if ctx.has_bias else None
        prepared = products.operand(flat, gradient=True)
        if tp.exchange:
            multiply = products.into(prepared, weight, gradient=True)
            finish = tp.exchange.start_reduce_scatter(prepared[0], multiply, weight.shape[1], gradient.dtype)
            weight_grad = _wgrad(weight, tp, prepared, tuple(kept))
            return finish().view(-1, *gradient.shape[1:-1], weight.shape[1]), weight_grad, bias, None
        rows = products.dgrad(prepared, weight).view(*gradient.shape[:2], -1)
        if tp.sequence_parallel:
            rows, work = tp.reduce_scattered(rows, asynchronous=True)
        elif tp.ranks > 1:
            work = dist.all_reduce(rows, group=tp.group, async_op=True)
        weight_grad = _wgrad(weight, tp, prepared, tuple(kept))
        if work is not None:
            work.wait()
        return rows, weight_grad, bias, None


class RowParallelMatmul(torch.autograd.Function):
    """rows @ weight.T, where each rank holds some of the inputs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Parameter, tp: TensorParallelContext) -> Tensor:
        """Multiply, then sum over ranks; arguments as in ColumnParallelMatmul, weight of shape (out, in of this rank)."""
        ctx.tp = tp
        flat = _as_matrix(rows)
        if tp.exchange:
            operand = tp.products.operand(flat)
            ctx.save_for_backward(weight, *operand[-2:])
            multiply = tp.products.into(operand, weight)
            total = tp.exchange.multiply_and_reduce_scatter(operand[0], multiply, weight.shape[0], rows.dtype)
            return total.view(-1, rows.shape[1], weight.shape[0])
        product, kept = tp.products.forward(flat, weight, None)
        ctx.save_for_backward(weight, *kept)
        out = product.view(*rows.shape[:2], -1)
        if tp.sequence_parallel:
            return tp.reduce_scattered(out)[0]
        if tp.ranks > 1:
            dist.all_reduce(out, group=tp.group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gather the gradient under sequence parallelism, then compute dgrad and wgrad."""
        weight, *kept = ctx.saved_tensors
        tp, products = ctx.tp, ctx.tp.products
        if tp.exchange:
            rows, prepared = _gathered_product(gradient, weight, tp, gradient=True)
        else:
            full = tp.gathered(gradient) if tp.sequence_parallel else gradient
            prepared = products.operand(_as_matrix(full), gradient=True)
            rows = products.dgrad(prepared, weight)
        return rows.view(-1, gradient.shape[1], weight.shape[1]), _wgrad(weight, tp, prepared, tuple(kept)), None


class ChosenProducts:
    """What both linear modules add to Megatron's: their products, and how their tensor ranks exchange."""

    products_type: type[LinearProducts] = LinearProducts
    overlapped = False
    weight: Parameter

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tp_context = context_of(self)
        if self.tp_context.fused_wgrad:
            let_accumulate(self.weight)


class ColumnLinear(ChosenProducts, ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's ColumnParallelLinear with these products."""

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply, shape (tokens, sequences, in) -> (tokens, sequences, out of this rank); and a bias to add later."""
        bias = None if self.skip_bias_add else self.bias
        out = ColumnParallelMatmul.apply(rows, self.weight, bias, self.tp_context)  # type: ignore[no-untyped-call]
        return out, self.bias if self.skip_bias_add else None


class RowLinear(ChosenProducts, RowParallelLinear):  # type: ignore[misc]
    """Megatron's RowParallelLinear with these products."""

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply, shape (tokens, sequences, in of this rank) -> (tokens, sequences, out); and a bias to add later."""
        out = RowParallelMatmul.apply(rows, self.weight, self.tp_context)  # type: ignore[no-untyped-call]
        if self.skip_bias_add:
            return out, self.bias
        return out if self.bias is None else out + self.bias, None


def context_of(module: Any) -> TensorParallelContext:
    """Return how the tensor ranks of a linear module of ours or of Megatron's exchange."""
    ranks = module.tp_group.size()
    sequence_parallel = bool(module.sequence_parallel and ranks > 1)
    return TensorParallelContext(
        group=module.tp_group,
        ranks=ranks,
        sequence_parallel=sequence_parallel,
        exchange=exchange_of(module.tp_group) if getattr(module, "overlapped", False) and sequence_parallel else None,
        fused_wgrad=module.gradient_accumulation_fusion,
        products=getattr(module, "products_type", LinearProducts)(),
    )


def linear_types(products: type[LinearProducts], *, overlapped: bool) -> tuple[type[ColumnLinear], type[RowLinear]]:
    """Return both modules for a spec, with these products, overlapped or not."""
    choices = {"products_type": products, "overlapped": overlapped}
    return type("ColumnLinear", (ColumnLinear,), choices), type("RowLinear", (RowLinear,), choices)
