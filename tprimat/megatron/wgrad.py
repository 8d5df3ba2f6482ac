"""Weight gradients added straight into Megatron's fp32 buffer by the matrix product that makes them.

Megatron-Core asks for Apex's extension `fused_weight_gradient_mlp_cuda` for it. cuBLAS takes a bf16 product with an fp32
accumulator as well, and torch reaches it through addmm's `out_dtype`: a module with the two functions that Megatron calls
is all that is missing. It saves one write and two reads of every gradient in each micro-batch.
"""

import sys
import types

import torch
from torch import Tensor
from torch.nn import Parameter

MODULE = "fused_weight_gradient_mlp_cuda"


def accumulate_product(total: Tensor, gradient: Tensor, rows: Tensor, factor: float = 1.0, *, overwrite: bool = False) -> None:
    """Total += factor x gradient.T @ rows.

    Args:
        total: shape (out, in), fp32.
        gradient: shape (n, out).
        rows: shape (n, in), dtype as gradient.
        factor: applied in fp32.
        overwrite: total = instead; what stands there is not read.
    """
    kept = 0 if overwrite else 1
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), rows, beta=kept, alpha=factor)
    elif gradient.is_cuda:
        torch.addmm(total, gradient.t(), rows, beta=kept, alpha=factor, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(gradient.t().to(total.dtype), rows.to(total.dtype), beta=kept, alpha=factor)


def works_on(device: torch.device) -> bool:
    """Whether this torch and this device multiply bf16 into fp32: tried on a small product, compared with the plain way."""
    generator = torch.Generator(device).manual_seed(0)
    gradient, rows = (torch.randn(64, 32, device=device, generator=generator).bfloat16() for _ in range(2))
    total, expected = torch.full((32, 32), torch.nan, device=device), gradient.float().t() @ rows.float()
    try:
        accumulate_product(total, gradient, rows, overwrite=True)
        accumulate_product(total, gradient, rows)
    except (RuntimeError, TypeError):  # an older torch has no such product, or not for this device
        return False
    return torch.allclose(total, 2 * expected, rtol=1e-3, atol=1e-3)


def first_of_the_step(weight: Parameter) -> bool:
    """Whether the gradient that comes now is the first since gradient_buffer.begin_step, and overwrites. Ask once for each."""
    first: bool = getattr(weight, "gradient_is_old", False)
    if first:
        weight.gradient_is_old = False  # type: ignore[attr-defined]
    return first


def install() -> None:
    """Offer the two functions under the extension's name, unless Apex is there; call before importing megatron.core."""
    if MODULE in sys.modules:
        return
    module = types.ModuleType(MODULE)
    module.wgrad_gemm_accum_fp32 = _into_buffer  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp16 = _into_buffer  # type: ignore[attr-defined]
    sys.modules[MODULE] = module


def _into_buffer(rows: Tensor, gradient: Tensor, total: Tensor) -> None:
    accumulate_product(total, gradient, rows)
