"""The layers' products in 8-bit floating point by torch's scaled matrix product, without Transformer Engine.

Each tensor is multiplied by one factor that moves its largest magnitude to the largest number of the type, and rounded; the
product is divided by both factors in fp32 ("current" tensor-wise scaling: FP8-LM, arXiv:2310.18313, and torchao). Rows and
weights are e4m3, where precision counts; gradients are e5m2, where range counts. The matrix units want both operands with the
summed dimension contiguous: dgrad takes W transposed, and wgrad both dY and X, so a conversion writes the matrix and its
transpose in one pass. Attention and the output layer stay in bf16, and so do models with experts, which gained nothing on an
H200.
"""

from functools import cache
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from tprimat.megatron import compat, cublaslt
from tprimat.megatron.compat import compiled, triton_kernels
from tprimat.megatron.cublaslt import Scaled
from tprimat.megatron.linear import LinearProducts, Operand, row_maxima
from tprimat.megatron.tp_overlap import Multiply
from tprimat.megatron.wgrad import add_gradient

FORWARD_DTYPE, GRADIENT_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
Converted = tuple[Tensor, Tensor, Tensor]
"""A matrix, its transpose, and the factor that undoes the scaling: what `convert` returns."""

_step = 0
_weights: WeakSet["Fp8Products"] = WeakSet()


def next_step() -> None:
    """Convert weights again from now on, because the optimizer has changed them."""
    global _step  # noqa: PLW0603 - one training loop a process, and a weight's owner cannot see the optimizer
    _step += 1


def free_weights() -> None:
    """Free all weights in 8 bits: who multiplies next converts them again."""
    for products in _weights:
        products.converted = None


@torch.no_grad()
def refresh_weights() -> None:
    """Convert all weights in 8 bits again, into the memory that they have: graphs read them there."""
    for products in _weights:
        if products.converted is not None:
            for kept, fresh in zip(products.converted, convert(products.weight, FORWARD_DTYPE), strict=True):
                kept.copy_(fresh)
            products.step = _step


def convert(x: Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> Converted:
    """Convert a matrix to one of torch's float8 types; `row_maxima` of linear.py spares the search for its largest magnitude.

    Where each rank of a group has some of a matrix's rows, all scale by the largest magnitude of them all.
    """
    searched = x if (maxima := row_maxima(x)) is None else maxima
    kernels = triton_kernels(x)
    largest = kernels.largest_magnitude(searched.contiguous()) if kernels else compiled(_largest)(searched)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scaled = kernels.scaled_and_transposed if kernels else compiled(_scaled)
    return scaled(x.contiguous(), largest, dtype)  # type: ignore[no-any-return]


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax().float()


def _scaled(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Converted:
    limit = torch.finfo(dtype).max
    scale = torch.full_like(largest, limit) / largest.clamp(min=1e-12)  # a number / a tensor would be rounded twice
    small = (x.float() * scale).clamp(-limit, limit).to(dtype)
    return small, small.t().contiguous(), scale.reciprocal()


def accumulate(total: Tensor, a: Scaled, b: Scaled, *, overwrite: bool) -> None:
    """Total += a @ b.T, or total = with `overwrite`, with partial sums in fp32; shapes (m, n), (m, k) and (n, k)."""
    if total.is_cuda and accumulates_on(total.device):
        cublaslt.accumulate(total, a, b, overwrite=overwrite)
    else:  # the product is rounded to bf16, far finer than what went into it
        add_gradient(total, multiply(a, b, fast=False), overwrite=overwrite)


@cache
def accumulates_on(device: torch.device) -> bool:
    """Whether cuBLASLt adds 8-bit products to fp32 on this device: tried on a small product and compared with one in fp32."""
    if torch.version.cuda is None:
        return False
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(64, 32, device=device, generator=generator).bfloat16() for _ in range(2))
    total, expected = torch.full((64, 64), torch.nan, device=device), a.float() @ b.float().t()
    try:
        (small_a, _, scale_a), (small_b, _, scale_b) = convert(a, GRADIENT_DTYPE), convert(b, FORWARD_DTYPE)
        for overwrite in (True, False):
            cublaslt.accumulate(total, (small_a, scale_a), (small_b, scale_b), overwrite=overwrite)
    except (OSError, AttributeError, RuntimeError):  # no such library, or not for this device
        return False
    return torch.allclose(total, 2 * expected, atol=4.0)


def multiply(a: Scaled, b: Scaled, *, fast: bool, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return a @ b.T + bias in bf16, (m, k), (n, k) and (n,), or write it to `out`, (m, n).

    `fast` sums in the matrix unit's own precision, on Hopper about 14 bits (arXiv:2412.19437, section 3.3.2), instead of fp32.
    """
    (left, scale_a), (right, scale_b) = a, b
    return compat.scaled_matmul(  # type: ignore[no-any-return]
        left, right.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast, out=out
    )


class Fp8Products(LinearProducts):
    """The products of one weight in 8 bits."""

    uses_row_maxima: ClassVar[bool] = True
    sums_in_fp32_only: ClassVar[bool] = True

    def __init__(self) -> None:
        self.products = 0
        """Forward products so far: the evidence that this ran."""
        self.converted: Converted | None = None
        """The weight, for the step in which it does not change."""
        self.step, self.weight = -1, torch.empty(0)
        """Of `converted`: when, and from what."""
        _weights.add(self)

    def _weight(self, weight: Tensor) -> Converted:
        if self.converted is None or self.step != _step:
            self.converted, self.step, self.weight = convert(weight.detach(), FORWARD_DTYPE), _step, weight
        return self.converted

    def operand(self, x: Tensor, *, gradient: bool = False, group: dist.ProcessGroup | None = None) -> Converted:
        """Return the matrix, its transpose and its scale."""
        return convert(x, GRADIENT_DTYPE if gradient else FORWARD_DTYPE, group)

    def whole(self, shard: Operand, full: Tensor) -> Converted:
        """Transpose what was gathered: a copy in 8 bits instead of a conversion from 16."""
        kernels = triton_kernels(full)
        return full, kernels.transposed(full) if kernels else full.t().contiguous(), shard[2]

    def into(self, operand: Operand, weight: Tensor, *, gradient: bool = False) -> Multiply:
        """See LinearProducts."""
        self.products += not gradient
        small, transposed, scale = self._weight(weight)
        matrix = transposed if gradient else small
        return lambda rows, out: multiply((rows, operand[2]), (matrix, scale), fast=not gradient, out=out)

    def forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Operand]:
        """Return rows @ weight.T + bias, and for the backward pass the transposed rows and their scale."""
        self.products += 1
        small, transposed, scale = convert(rows, FORWARD_DTYPE)
        small_weight, _, weight_scale = self._weight(weight)
        return multiply((small, scale), (small_weight, weight_scale), fast=True, bias=bias), (transposed, scale)

    def dgrad(self, prepared: Operand, weight: Tensor) -> Tensor:
        """Return gradient @ weight."""
        small, _, scale = prepared
        _, transposed_weight, weight_scale = self._weight(weight)
        return multiply((small, scale), (transposed_weight, weight_scale), fast=False)

    def wgrad(self, total: Tensor, prepared: Operand, kept: Any, *, overwrite: bool) -> None:
        """Total += gradient.T @ rows, or =."""
        _, transposed, scale = prepared
        accumulate(total, (transposed, scale), kept, overwrite=overwrite)
