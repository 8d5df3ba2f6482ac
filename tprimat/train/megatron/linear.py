"""The layers' matrix products as modules of Megatron's spec: the same split over tensor ranks, with kernels of our choice.

Megatron-Core's own modules multiply in the weight's dtype and wait for each exchange of a forward pass. These take a
`Kernels` (bf16, or fp8 from fp8_kernels.py), keep what was gathered instead of gathering it once more in the backward
pass, and can cut a product into pieces that are sent while the next one is multiplied (symmetric memory).
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn import Parameter

from tprimat.train.megatron.weight_gradients import accumulate_product


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

    def add_weight_gradient(self, total: Tensor, prepared: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> None:
        """Total += gradient.T @ rows."""
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

    def add_weight_gradient(self, total: Tensor, prepared: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> None:
        """As the protocol says."""
        accumulate_product(total, prepared[0], kept[0])


@dataclass(frozen=True)
class Split:
    """How the ranks around one weight exchange activations."""

    group: dist.ProcessGroup
    ranks: int
    sequence_parallel: bool
    """Whether activations outside are cut along the sequence."""
    overlapped: bool
    """Whether products and exchanges run piece by piece, at once."""
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
        split.kernels.add_weight_gradient(total, prepared, kept)
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.empty_like(weight)
    fresh = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    split.kernels.add_weight_gradient(fresh, prepared, kept)
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
        if split.overlapped:
            full, out = gather_and_multiply(rows, weight.t(), split)
            flat: tuple[Tensor, ...] = (full.flatten(0, 1),)
            out = out if bias is None else out + bias
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
        prepared = kernels.prepare(flat)
        rows = kernels.input_gradient(prepared, weight).view(*gradient.shape[:2], -1)
        if split.sequence_parallel:
            rows, work = split.scattered(rows, asynchronous=True)
        elif split.ranks > 1:
            work = dist.all_reduce(rows, group=split.group, async_op=True)
        weights = weight_gradient(weight, split, prepared, tuple(kept))
        bias = flat.sum(dim=0) if ctx.has_bias else None
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
        if split.overlapped:
            ctx.save_for_backward(weight, flat)
            return multiply_and_scatter(rows, weight.t(), split)
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
        if split.overlapped:
            gradient, rows = gather_and_multiply(gradient, weight, split)
            prepared: tuple[Tensor, ...] = (gradient.flatten(0, 1),)
        else:
            gradient = split.gathered(gradient) if split.sequence_parallel else gradient
            prepared = kernels.prepare(gradient.flatten(0, 1))
            rows = kernels.input_gradient(prepared, weight).view(*gradient.shape[:2], -1)
        return rows, weight_gradient(weight, split, prepared, tuple(kept)), None


@cache
def can_overlap() -> bool:
    """Whether this torch has products that exchange piece by piece, and the GPUs read each other's memory, as they must."""
    if not torch.cuda.is_available() or symmetric_memory() is None or not hasattr(torch.ops.symm_mem, "fused_all_gather_matmul"):
        return False
    return all(torch.cuda.can_device_access_peer(0, other) for other in range(1, torch.cuda.device_count()))


@cache
def symmetric_memory() -> Any:
    """Torch's module, whose import registers the operators; None in a torch without it."""
    try:
        return import_module("torch.distributed._symmetric_memory")
    except ImportError:
        return None


def gather_and_multiply(rows: Tensor, matrix: Tensor, split: Split) -> tuple[Tensor, Tensor]:
    """All ranks' rows, and them times the matrix: a rank's rows travel while another's are multiplied.

    Args:
        rows: shape (n, sequences, in), of this rank.
        matrix: shape (in, out).
        split: over whom.

    Returns:
        shapes (ranks x n, sequences, in) and (ranks x n, sequences, out).
    """
    if not rows.is_cuda:
        full = split.gathered(rows)
        return full, full @ matrix
    full, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(rows.contiguous(), [matrix], 0, split.group.group_name)
    return full, out


def multiply_and_scatter(rows: Tensor, matrix: Tensor, split: Split) -> Tensor:
    """Rows @ matrix summed over ranks, of which each keeps its own rows, shape (n / ranks, sequences, out)."""
    if not rows.is_cuda:
        summed, _ = split.scattered(rows @ matrix)
        return summed
    out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(rows.contiguous(), matrix, "sum", 0, split.group.group_name)
    return out


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
    if module.overlapped and sequence_parallel and torch.cuda.is_available():
        symmetric_memory().enable_symm_mem_for_group(module.tp_group.group_name)
    return Split(
        group=module.tp_group,
        ranks=ranks,
        sequence_parallel=sequence_parallel,
        overlapped=module.overlapped and sequence_parallel,
        fused=module.gradient_accumulation_fusion,
        kernels=module.kernel_type(),
    )


def linear_types(kernels: type[Kernels], *, overlapped: bool) -> tuple[type[ColumnLinear], type[RowLinear]]:
    """Both modules for a spec, with the kernels and the exchange that are wanted."""
    choices = {"kernel_type": kernels, "overlapped": overlapped}
    return type("ColumnLinear", (ColumnLinear,), choices), type("RowLinear", (RowLinear,), choices)
