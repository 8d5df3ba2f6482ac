"""Triton kernels that move rows to places and back, at the memory's bandwidth; rows.py has the same for any device.

torch.compile reads such rows two bytes at a time, because it does not know that a row found through an index is contiguous.
Here each program handles whole rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE = 2048
"""Numbers in a row above which a program gets twice the warps."""


@triton.jit  # type: ignore[untyped-decorator]
def _permute_gather(rows, source, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(rows + tl.load(source + row).to(tl.int64) * width + column, mask=inside)
    tl.store(out + row * width + column, values, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _permute_spread(x, places, weights, out, width, K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803, PLR0913, PLR0917
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + token * width + column, mask=inside)
    for choice in tl.static_range(K):
        place = tl.load(places + token * K + choice).to(tl.int64)
        if WEIGHTED:
            weighted = values.to(tl.float32) * tl.load(weights + token * K + choice)
            tl.store(out + place * width + column, weighted.to(out.dtype.element_ty), mask=inside)
        else:
            tl.store(out + place * width + column, values, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _permute_add_up(rows, places, weights, out, width, K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803, PLR0913, PLR0917
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(K):
        place = tl.load(places + token * K + choice).to(tl.int64)
        values = tl.load(rows + place * width + column, mask=inside).to(tl.float32)
        if WEIGHTED:
            values = values * tl.load(weights + token * K + choice)
        total += values
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _permute_weights_gradient(gradient, rows, places, out, width, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803, PLR0913, PLR0917
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    own = tl.load(gradient + token * width + column, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(K):
        place = tl.load(places + token * K + choice).to(tl.int64)
        values = tl.load(rows + place * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * K + choice, tl.sum(own * values))


def _sizes(width: int) -> dict[str, int]:
    return {"BLOCK": triton.next_power_of_2(width), "num_warps": 4 if width <= WIDE else 8}


def gather(rows: Tensor, source: Tensor) -> Tensor:
    """See rows.py."""
    out = rows.new_empty(source.numel(), rows.shape[1])
    _permute_gather[(source.numel(),)](rows, source, out, rows.shape[1], **_sizes(rows.shape[1]))
    return out


def spread(x: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """See rows.py."""
    (tokens, choices), width = places.shape, x.shape[1]
    out = x.new_empty(tokens * choices, width)
    factors = x if weights is None else weights.contiguous()
    _permute_spread[(tokens,)](x, places, factors, out, width, K=choices, WEIGHTED=weights is not None, **_sizes(width))
    return out


def add_up(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """See rows.py."""
    (tokens, choices), width = places.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    factors = rows if weights is None else weights.contiguous()
    _permute_add_up[(tokens,)](rows, places, factors, out, width, K=choices, WEIGHTED=weights is not None, **_sizes(width))
    return out


def weights_gradient(gradient: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """See rows.py."""
    width = rows.shape[1]
    out = torch.empty(places.shape, dtype=torch.float32, device=rows.device)
    _permute_weights_gradient[(places.shape[0],)](gradient, rows, places, out, width, K=places.shape[1], **_sizes(width))
    return out
