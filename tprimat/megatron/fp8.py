"""Products in 8-bit floating point by torch's scaled_mm, without Transformer Engine: rows and weights e4m3, gradients e5m2.

Each tensor gets one scale, taken from its own largest magnitude ("current scaling", as in FP8-LM, arXiv:2310.18313, and
torchao's tensor-wise recipe). The matrix units want both operands with the summed dimension contiguous, so what the
backward pass multiplies along the tokens is transposed while it is converted. A weight is converted once in a step.
"""

from typing import Any

import torch
from torch import Tensor

from tprimat.megatron.compilation import compiled

ROWS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2

_step = 0


def next_step() -> None:
    """Weights have changed."""
    global _step  # noqa: PLW0603 - one training loop a process, and a weight's owner cannot see the optimizer
    _step += 1


def convert(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in 8 bits.

    Args:
        x: shape (rows, columns).
        dtype: one of torch's float8 types.

    Returns:
        the matrix, its transpose (each contiguous), and the factor back, shape ().
    """
    largest = compiled(_largest)(x)
    return compiled(_scaled)(x, largest, dtype)  # type: ignore[no-any-return]


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax().float()


def _scaled(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    limit = torch.finfo(dtype).max
    scale = limit / largest.clamp(min=1e-12)
    small = (x.float() * scale).clamp(-limit, limit).to(dtype)
    return small, small.t().contiguous(), scale.reciprocal()


def _add(total: Tensor, product: Tensor) -> None:
    """Compiled, since torch's own kernel for two dtypes stays well below the memory's speed."""
    total.add_(product)


def _write(total: Tensor, product: Tensor) -> None:
    total.copy_(product)


Scaled = tuple[Tensor, Tensor]
"""A matrix of 8-bit numbers, and the factor back, shape ()."""


def multiply(a: Scaled, b: Scaled, *, fast: bool, bias: Tensor | None = None) -> Tensor:
    """A @ b.T in bf16.

    Args:
        a: shape (m, k).
        b: shape (n, k).
        fast: sum in the matrix unit's own precision instead of moving partial sums to fp32; on Hopper that is about 14 bits
            (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
        bias: shape (n,), bf16.
    """
    (left, scale_a), (right, scale_b) = a, b
    return torch._scaled_mm(
        left, right.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def works_on(device: torch.device) -> bool:
    """Whether this torch and this device multiply 8 bits: tried on a small product, compared with bf16's."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(64, 32, device=device, generator=generator).bfloat16() for _ in range(2))
    try:
        (small_a, _, scale_a), (small_b, _, scale_b) = _scaled(a, _largest(a), GRADIENTS), _scaled(b, _largest(b), ROWS)
        product = multiply((small_a, scale_a), (small_b, scale_b), fast=False)
    except (RuntimeError, TypeError, ValueError):  # an older torch, or matrix units without these two types
        return False
    return torch.allclose(product.float(), a.float() @ b.float().t(), atol=2.0)


class Fp8Kernels:
    """The products of one weight."""

    def __init__(self) -> None:
        self.products = 0
        """Taken so far: the evidence that this ran."""
        self._converted: tuple[Tensor, Tensor, Tensor] | None = None
        self._step = -1

    def _weight(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self._converted is None or self._step != _step:
            self._converted, self._step = convert(weight.detach(), ROWS), _step
        return self._converted

    def forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rows @ weight.T + bias; kept are the rows transposed, and their scale."""
        self.products += 1
        small, transposed, scale = convert(rows, ROWS)
        small_weight, _, weight_scale = self._weight(weight)
        return multiply((small, scale), (small_weight, weight_scale), fast=True, bias=bias), (transposed, scale)

    def prepare(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """The gradient, its transpose and its scale."""
        return convert(gradient, GRADIENTS)

    def input_gradient(self, prepared: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        """Gradient @ weight."""
        small, _, scale = prepared
        _, transposed_weight, weight_scale = self._weight(weight)
        return multiply((small, scale), (transposed_weight, weight_scale), fast=False)

    def add_weight_gradient(self, total: Tensor, prepared: tuple[Tensor, ...], kept: Any, *, overwrite: bool) -> None:
        """Total += gradient.T @ rows, or =; the product is rounded to bf16, far finer than what went into it."""
        _, transposed, scale = prepared
        transposed_rows, rows_scale = kept
        compiled(_write if overwrite else _add)(total, multiply((transposed, scale), (transposed_rows, rows_scale), fast=False))
