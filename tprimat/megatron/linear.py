"""The layers' matrix products as modules of Megatron's spec: the same split over tensor ranks, with kernels of our choice.

Megatron-Core's own modules multiply in the weight's dtype and wait for each exchange of a forward pass. These take a
`Kernels` (bf16, or fp8 from fp8_kernels.py), keep what was gathered instead of gathering it once more in the backward
pass, and can run the exchange beside the product (symmetric.py).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn import Parameter

from tprimat.megatron.tp_overlap import Exchange, exchange_of
from tprimat.megatron.wgrad import accumulate_product, first_of_the_step


class Kernels(Protocol):
    """How the three products of one weight are taken. All rows are matrices, shape (n, in) or (n, out)."""

    def forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rows @ weight.T + bias, and what of the rows the backward pass will need."""
        ...

    def prepare(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """The output's gradient in the form in which both products of the backward pass take it."""
        ...

    def input_gradient(self, prepared: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        """Gradient @ weight."""
        ...

    def add_weight_gradient(
        self, total: Tensor, prepared: tuple[Tensor, ...], kept: tuple[Tensor, ...], *, overwrite: bool
    ) -> None:
        """Total += gradient.T @ rows, or = where what stands there is of an earlier step."""
        ...


class PlainKernels:
    """Products in the dtype of the weight."""

    def forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As the protocol says."""
        return F.linear(rows, weight, bias), (rows,)

    def prepare(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """As it is."""
        return (gradient,)

    def input_gradient(self, prepared: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        """As the protocol says."""
        return prepared[0] @ weight

    def add_weight_gradient(
        self, total: Tensor, prepared: tuple[Tensor, ...], kept: tuple[Tensor, ...], *, overwrite: bool
    ) -> None:
        """As the protocol says."""
        accumulate_product(total, prepared[0], kept[0], overwrite=overwrite)


@dataclass(frozen=True)
class Split:
    """How the ranks around one weight exchange activations."""

    group: dist.ProcessGroup
    ranks: int
    sequence_parallel: bool
    """Whether activations outside are cut along the sequence."""
    exchange: Exchange | None
    """Which runs beside the products; None: NCCL or gloo does, before and after them."""
    fused: bool
    """Whether weight gradients go straight into the fp32 buffer."""
    kernels: Kernels

    def gathered(self, rows: Tensor) -> Tensor:
        """All ranks' rows, shape (ranks x n, ...)."""
        out = rows.new_empty((self.ranks * rows.shape[0], *rows.shape[1:]))
        dist.all_gather_into_tensor(out, rows.contiguous(), group=self.group)
        return out

    def scattered(self, rows: Tensor, *, asynchronous: bool = False) -> tuple[Tensor, dist.Work | None]:
        """The sum over ranks, of which each keeps its own rows, shape (n / ranks, ...)."""
        out = rows.new_empty((rows.shape[0] // self.ranks, *rows.shape[1:]))
        return out, dist.reduce_scatter_tensor(out, rows.contiguous(), group=self.group, async_op=asynchronous)


def weight_gradient(weight: Parameter, split: Split, prepared: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> Tensor:
    """Added to the fp32 buffer, if Megatron holds one; what autograd gets then only tells it that the gradient is there."""
    total = getattr(weight, "main_grad", None)
    if split.fused and total is not None:
        split.kernels.add_weight_gradient(total, prepared, kept, overwrite=first_of_the_step(weight))
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.empty_like(weight)
    fresh = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    split.kernels.add_weight_gradient(fresh, prepared, kept, overwrite=True)
    return fresh.to(weight.dtype)


class ColumnProduct(torch.autograd.Function):
    """rows @ weight.T + bias, where each rank has some of the outputs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Parameter, bias: Tensor | None, split: Split) -> Tensor:
        """Gather the rows under sequence parallelism, then multiply.

        Args:
            ctx: keeps what the backward pass needs.
            rows: shape (tokens, sequences, in).
            weight: shape (out of this rank, in).
            bias: shape (out of this rank,).
            split: over whom, and how.
        """
        ctx.split, ctx.has_bias = split, bias is not None
        if split.exchange:
            full, product = split.exchange.gather_and_multiply(rows.contiguous().flatten(0, 1), weight.t())
            flat: tuple[Tensor, ...] = (full,)
            out = (product if bias is None else product + bias).view(-1, rows.shape[1], weight.shape[0])
        else:
            full = split.gathered(rows) if split.sequence_parallel else rows
            product, flat = split.kernels.forward(full.flatten(0, 1), weight, bias)
            out = product.view(*full.shape[:2], -1)
        ctx.save_for_backward(weight, *flat)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The rows' gradient is summed over ranks while the weight's is taken."""
        weight, *kept = ctx.saved_tensors
        split, kernels, work = ctx.split, ctx.split.kernels, None
        flat = gradient.flatten(0, 1)
        bias = flat.sum(dim=0) if ctx.has_bias else None
        prepared = kernels.prepare(flat)
        if split.exchange:
            scattered = split.exchange.scatter_behind(flat, weight)
            weights = weight_gradient(weight, split, prepared, tuple(kept))
            return scattered.finish().view(-1, *gradient.shape[1:-1], weight.shape[1]), weights, bias, None
        rows = kernels.input_gradient(prepared, weight).view(*gradient.shape[:2], -1)
        if split.sequence_parallel:
            rows, work = split.scattered(rows, asynchronous=True)
        elif split.ranks > 1:
            work = dist.all_reduce(rows, group=split.group, async_op=True)
        weights = weight_gradient(weight, split, prepared, tuple(kept))
        if work is not None:
            work.wait()
        return rows, weights, bias, None


class RowProduct(torch.autograd.Function):
    """rows @ weight.T, where each rank has some of the inputs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Parameter, split: Split) -> Tensor:
        """Multiply, then sum over ranks; arguments as ColumnProduct's, weight of shape (out, in of this rank)."""
        ctx.split = split
        flat = rows.flatten(0, 1)
        if split.exchange:
            ctx.save_for_backward(weight, flat)
            return split.exchange.multiply_and_scatter(flat, weight.t()).view(-1, rows.shape[1], weight.shape[0])
        product, kept = split.kernels.forward(flat, weight, None)
        ctx.save_for_backward(weight, *kept)
        out = product.view(*rows.shape[:2], -1)
        if split.sequence_parallel:
            return split.scattered(out)[0]
        if split.ranks > 1:
            dist.all_reduce(out, group=split.group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gather the gradient under sequence parallelism, then both products."""
        weight, *kept = ctx.saved_tensors
        split, kernels = ctx.split, ctx.split.kernels
        if split.exchange:
            full, flat = split.exchange.gather_and_multiply(gradient.contiguous().flatten(0, 1), weight)
            rows = flat.view(-1, gradient.shape[1], weight.shape[1])
            prepared: tuple[Tensor, ...] = (full,)
        else:
            gradient = split.gathered(gradient) if split.sequence_parallel else gradient
            prepared = kernels.prepare(gradient.flatten(0, 1))
            rows = kernels.input_gradient(prepared, weight).view(*gradient.shape[:2], -1)
        return rows, weight_gradient(weight, split, prepared, tuple(kept)), None


class ColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """ColumnParallelLinear with these products."""

    kernel_type: type[Kernels] = PlainKernels
    overlapped = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.split = _split_of(self)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply, shape (tokens, sequences, in) -> (tokens, sequences, out of this rank); the bias, where it is added later."""
        bias = None if self.skip_bias_add else self.bias
        out = ColumnProduct.apply(rows, self.weight, bias, self.split)  # type: ignore[no-untyped-call]
        return out, self.bias if self.skip_bias_add else None


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """RowParallelLinear with these products."""

    kernel_type: type[Kernels] = PlainKernels
    overlapped = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.split = _split_of(self)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply, shape (tokens, sequences, in of this rank) -> (tokens, sequences, out); the bias, where it is added later."""
        out = RowProduct.apply(rows, self.weight, self.split)  # type: ignore[no-untyped-call]
        if self.skip_bias_add:
            return out, self.bias
        return out if self.bias is None else out + self.bias, None


def _split_of(module: ColumnLinear | RowLinear) -> Split:
    ranks = module.tp_group.size()
    sequence_parallel = bool(module.sequence_parallel and ranks > 1)
    return Split(
        group=module.tp_group,
        ranks=ranks,
        sequence_parallel=sequence_parallel,
        exchange=exchange_of(module.tp_group) if module.overlapped and sequence_parallel else None,
        fused=module.gradient_accumulation_fusion,
        kernels=module.kernel_type(),
    )


def linear_types(kernels: type[Kernels], *, overlapped: bool) -> tuple[type[ColumnLinear], type[RowLinear]]:
    """Both modules for a spec, with the kernels and the exchange that are wanted."""
    choices = {"kernel_type": kernels, "overlapped": overlapped}
    return type("ColumnLinear", (ColumnLinear,), choices), type("RowLinear", (RowLinear,), choices)
