"""Triton kernels at the memory's bandwidth: conversions to 8 bits, and rows that move to places and back.

fp8.py and experts.py have the same for any device. torch.compile writes a transpose in narrow strips (2 TB/s on an H200), and
reads rows that are found through an index two bytes at a time. Here each program writes a tile to both results in full lines, and
handles whole rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Conversions to 8 bits.

TILE_ROWS, TILE_COLUMNS, TILE_WARPS = 64, 128, 4
"""Of a conversion. On an H200 tiles of 64 to 128 by 64 to 128 move 3.4 to 3.7 TB/s."""

CHUNK = 8192


@triton.jit
def _reduce_largest(x, largest, numbers, CHUNK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    magnitudes = tl.abs(tl.load(x + at, mask=at < numbers, other=0.0).to(tl.float32))
    tl.atomic_max(largest, tl.max(magnitudes), sem="relaxed")


@triton.jit
def _rounded(values, small, LIMIT: tl.constexpr):
    """Round to the dtype of `small`. NaN stays NaN."""
    return tl.clamp(values, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(small.dtype.element_ty)


@triton.jit
def _tile(rows, columns, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Return the rows (upright) and columns (level) of this program's tile, and which of it is inside the matrix."""
    row = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)).to(tl.int64)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def _store_tile(values, small, transposed, row, column, inside, rows, columns, LIMIT: tl.constexpr):
    """Round a tile and store it twice."""
    tile = _rounded(values, small, LIMIT)
    tl.store(small + row * columns + column, tile, mask=inside)
    tl.store(transposed + tl.trans(column) * rows + tl.trans(row), tl.trans(tile), mask=tl.trans(inside))


@triton.jit
def _scale_and_transpose(
    x, largest, small, transposed, undo, rows, columns, LIMIT: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr
):
    row, column, inside = _tile(rows, columns, TILE_ROWS, TILE_COLUMNS)
    # Every program computes the same scale, and one of them stores what undoes it.
    scale = tl.div_rn(LIMIT, tl.maximum(tl.load(largest), 1e-12))  # as torch divides
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(undo, tl.div_rn(1.0, scale))
    values = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32) * scale
    _store_tile(values, small, transposed, row, column, inside, rows, columns, LIMIT)


@triton.jit
def _transpose(x, transposed, rows, columns, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    row, column, inside = _tile(rows, columns, TILE_ROWS, TILE_COLUMNS)
    tile = tl.load(x + row * columns + column, mask=inside, other=0)
    tl.store(transposed + tl.trans(column) * rows + tl.trans(row), tl.trans(tile), mask=tl.trans(inside))


def transposed(x: Tensor) -> Tensor:
    """Return the transpose of a contiguous matrix in 8 bits, contiguous."""
    (rows, columns), out = x.shape, x.new_empty(x.shape[::-1])
    grid = (triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS))
    numbers = x.view(torch.uint8), out.view(torch.uint8)
    _transpose[grid](*numbers, rows, columns, TILE_ROWS, TILE_COLUMNS, num_warps=TILE_WARPS)
    return out


def largest_magnitude(x: Tensor) -> Tensor:
    """Return the largest magnitude of a contiguous tensor of any shape as fp32, shape (). NaN does not count."""
    largest = torch.zeros((), dtype=torch.float32, device=x.device)
    _reduce_largest[(triton.cdiv(x.numel(), CHUNK),)](x, largest, x.numel(), CHUNK, num_warps=8)
    return largest


def scaled_and_transposed(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, round and transpose a contiguous matrix in one pass, given its largest magnitude, fp32, shape ().

    Returns the matrix and its transpose (each contiguous) in a float8 type, and the factor that undoes the scaling, ().
    """
    rows, columns = x.shape
    small, transposed = x.new_empty((rows, columns), dtype=dtype), x.new_empty((columns, rows), dtype=dtype)
    undo = largest.new_empty(())
    grid = (triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS))
    limit = torch.finfo(dtype).max
    _scale_and_transpose[grid](
        x, largest, small, transposed, undo, rows, columns, limit, TILE_ROWS, TILE_COLUMNS, num_warps=TILE_WARPS
    )
    return small, transposed, undo


# Rows that move.

WIDE = 2048
"""Numbers in a row above which a program gets twice the warps."""


@triton.jit
def _permute_gather(rows, source, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(rows + tl.load(source + row).to(tl.int64) * width + column, mask=inside)
    tl.store(out + row * width + column, values, mask=inside)


@triton.jit
def _permute_spread(x, places, weights, out, width, K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):
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


@triton.jit
def _permute_add_up(rows, places, weights, out, width, K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):
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


@triton.jit
def _permute_weights_gradient(gradient, rows, places, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
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
    """See experts.py."""
    out = rows.new_empty(source.numel(), rows.shape[1])
    _permute_gather[(source.numel(),)](rows, source, out, rows.shape[1], **_sizes(rows.shape[1]))
    return out


def spread(x: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """See experts.py."""
    (tokens, choices), width = places.shape, x.shape[1]
    out = x.new_empty(tokens * choices, width)
    factors = x if weights is None else weights.contiguous()
    _permute_spread[(tokens,)](x, places, factors, out, width, K=choices, WEIGHTED=weights is not None, **_sizes(width))
    return out


def add_up(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """See experts.py."""
    (tokens, choices), width = places.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    factors = rows if weights is None else weights.contiguous()
    _permute_add_up[(tokens,)](rows, places, factors, out, width, K=choices, WEIGHTED=weights is not None, **_sizes(width))
    return out


def weights_gradient(gradient: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """See experts.py."""
    width = rows.shape[1]
    out = torch.empty(places.shape, dtype=torch.float32, device=rows.device)
    _permute_weights_gradient[(places.shape[0],)](gradient, rows, places, out, width, K=places.shape[1], **_sizes(width))
    return out
