"""The products of experts in 8-bit floating point, by torch's grouped product of scaled rows.

One factor a tensor, as in fp8.py, would let the largest row of any expert decide how finely all others are rounded. The grouped
product takes one factor for each row of the one operand and each column of the other, so that every row and every column
reaches the largest number of the type. Then e4m3 has range enough for gradients, too, and keeps its third bit of fraction:

    forward   Y  = X @ W.T    a factor for each row of X, and for each output of each expert
    dgrad     dX = dY @ W     a factor for each row of dY, and for each input of each expert

A weight is converted both ways once a step, and both copies stay. wgrad, a third of the products, remains in bf16, from rows kept
in bf16: it sums over the tokens of each expert, and 8-bit products take only multiples of 16 of them.

Unlike dgrad in fp8.py, dgrad here leaves its partial sums to the matrix unit's own precision (fp8.multiply), as forward
products do. Its sums are as long as an expert or a token is wide; those of wgrad would be longer.
"""

import torch
from torch import Tensor

from tprimat.core.errors import LaunchError
from tprimat.megatron import compat
from tprimat.megatron.cublaslt import Scaled
from tprimat.megatron.fp8 import OnceAStep, convert_rows
from tprimat.megatron.grouped import GroupedProducts, LoopedProducts, products_for


class Fp8GroupedProducts(GroupedProducts):
    """The products of one weight: forward and dgrad in 8 bits."""

    def __init__(self) -> None:
        self.products = 0
        """Forward products so far: the evidence that this ran."""
        self._copies = OnceAStep(_both_ways)

    def forward(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """See ExpertProducts."""
        self.products += 1
        by_output, _ = self._copies(weight)
        return multiply(convert_rows(rows), by_output, ends)

    def dgrad(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """See ExpertProducts."""
        _, by_input = self._copies(weight)
        return multiply(convert_rows(gradient), by_input, ends)


def _both_ways(weight: Tensor) -> tuple[Scaled, Scaled]:
    """Convert a weight, shape (experts, out, in), and its transpose, (experts, in, out)."""
    return convert_rows(weight), convert_rows(weight.transpose(1, 2).contiguous())


def multiply(rows: Scaled, matrices: Scaled, ends: Tensor) -> Tensor:
    """Multiply each row with its expert's matrix, transposed, in bf16; without a GPU the same numbers in fp32, expert by expert.

    Args:
        rows: shape (n, k), with scales of shape (n,).
        matrices: shape (experts, m, k), with scales of shape (experts, m).
        ends: see ExpertProducts.
    """
    (small, scale), (small_matrices, matrix_scale) = rows, matrices
    if not small.is_cuda:
        return _multiply_in_fp32(rows, matrices, ends).bfloat16()
    return compat.scaled_grouped_matmul(small, small_matrices.transpose(1, 2), (scale, matrix_scale), offs=ends)


def _multiply_in_fp32(rows: Scaled, matrices: Scaled, ends: Tensor) -> Tensor:
    plain, plain_matrices = (small.float() * scale[..., None] for small, scale in (rows, matrices))
    return LoopedProducts().forward(plain, plain_matrices, ends)


def multiplies_groups(device: torch.device) -> bool:
    """Whether this torch and this device multiply slices of 8-bit rows: tried on a few, and compared with fp32.

    Rows and columns differ in magnitude, so that a factor in the wrong place shows; one expert has no row, and some rows
    belong to nobody.
    """
    generator = torch.Generator(device).manual_seed(0)
    rows, weight = (torch.randn(shape, device=device, generator=generator) for shape in ((48, 32), (3, 16, 32)))
    rows *= 2.0 ** (torch.arange(48, device=device) % 7)[:, None]
    weight *= 2.0 ** (torch.arange(48, device=device) % 5).view(3, 16, 1)
    ends = torch.tensor([5, 5, 40], dtype=torch.int32, device=device)
    rows[40:] = torch.nan
    a, b = convert_rows(rows.bfloat16()), convert_rows(weight.bfloat16())
    expected = _multiply_in_fp32(a, b, ends)[:40]
    magnitudes = _multiply_in_fp32((a[0].float().abs(), a[1]), (b[0].float().abs(), b[1]), ends)[:40]
    try:
        product = multiply(a, b, ends)[:40].float()
    except (RuntimeError, TypeError, ValueError, LaunchError):  # an older torch, or no such product for this device
        return False
    return bool(((product - expected).abs() <= magnitudes / 100).all())


def fp8_products_for(device: torch.device) -> type[Fp8GroupedProducts]:
    """Return the products in 8 bits, if this device gives what it should.

    Raises:
        LaunchError: it does not.
    """
    if products_for(torch.bfloat16, device) is GroupedProducts and multiplies_groups(device):
        return Fp8GroupedProducts
    why = f"This device or torch {torch.__version__} has no grouped product of 8-bit rows with a scale each, or a wrong one."
    raise LaunchError("fp8 does not work here for experts.", why=why, fix="--precision bf16")
