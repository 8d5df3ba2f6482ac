"""The products of experts: many matrices, each with the rows of the tokens that chose its expert, in one kernel.

Rows are sorted by expert, so that an expert's rows are a slice. `ends`, which says where each ends, stays on the device: no
product waits for the host. A loop over the experts is the fallback where this torch, device or dtype has no grouped product.
"""

import torch
from torch import Tensor

from tprimat.megatron import compat


class GroupedProducts:
    """The three products of one weight of all experts of a rank, shape (experts, out, in), with rows sorted by expert.

    `ends` has shape (experts,), int32: the number of rows of each expert and all before it. Rows after the last end belong to
    nobody; what they become is undefined.
    """

    def forward(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Multiply, shape (n, in) -> (n, out): each row with its expert's weight, transposed."""
        return compat.grouped_matmul(rows, weight.transpose(-2, -1), offs=ends)

    def dgrad(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Multiply, shape (n, out) -> (n, in): each row with its expert's weight."""
        return compat.grouped_matmul(gradient, weight, offs=ends)

    def wgrad(self, gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        """Return gradient.T @ rows of each expert, shape (experts, out, in); zero for an expert without rows."""
        # A transposed gradient and plain rows need no alignment of the ends.
        return compat.grouped_matmul(gradient.t(), rows, offs=ends)


class LoopedProducts(GroupedProducts):
    """One product after the other; the host waits for the ends."""

    def forward(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """See GroupedProducts."""
        out = rows.new_zeros(rows.shape[0], weight.shape[1])
        for expert, part in enumerate(_slices(ends)):
            torch.mm(rows[part], weight[expert].t(), out=out[part])
        return out

    def dgrad(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """See GroupedProducts."""
        out = gradient.new_zeros(gradient.shape[0], weight.shape[2])
        for expert, part in enumerate(_slices(ends)):
            torch.mm(gradient[part], weight[expert], out=out[part])
        return out

    def wgrad(self, gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        """See GroupedProducts."""
        return torch.stack([gradient[part].t() @ rows[part] for part in _slices(ends)])


def _slices(ends: Tensor) -> list[slice]:
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def products_for(dtype: torch.dtype, device: torch.device) -> type[GroupedProducts]:
    """Return the products for this dtype on this device: grouped, if they give on small matrices what the loop gives."""
    generator = torch.Generator(device).manual_seed(0)
    rows, weight, gradient = (
        torch.randn(shape, device=device, generator=generator).to(dtype) for shape in ((48, 32), (3, 16, 32), (48, 16))
    )
    ends = torch.tensor([5, 5, 40], dtype=torch.int32, device=device)
    grouped, looped = GroupedProducts(), LoopedProducts()
    if not compat.has_grouped_matmul():
        return LoopedProducts
    try:
        pairs = [
            (grouped.forward(rows, weight, ends)[:40], looped.forward(rows, weight, ends)[:40]),
            (grouped.dgrad(gradient, weight, ends)[:40], looped.dgrad(gradient, weight, ends)[:40]),
            (grouped.wgrad(gradient, rows, ends), looped.wgrad(gradient, rows, ends)),
        ]
    except (RuntimeError, TypeError):  # none for this device or dtype
        return LoopedProducts
    alike = all(torch.allclose(one.float(), other.float(), rtol=2e-2, atol=2e-2) for one, other in pairs)
    return GroupedProducts if alike else LoopedProducts
