"""Rows of hidden states that move to places in another order and back.

Each token has k choices, and each choice its own place. All results are independent of the order in which a device works.
"""

from functools import partial

from torch import Tensor

from tprimat.megatron.compat import triton_kernels

_kernels = partial(triton_kernels, "row_kernels")


def gather(rows: Tensor, source: Tensor) -> Tensor:
    """Return the rows with these numbers: shape (n, hidden), and (m,) -> (m, hidden)."""
    if kernels := _kernels(rows):
        return kernels.gather(rows.contiguous(), source)  # type: ignore[no-any-return]
    return rows.index_select(0, source)


def spread(x: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Write each token's row to each of its places, times a weight: (tokens, hidden) -> (tokens x k, hidden).

    Args:
        x: shape (tokens, hidden).
        places: shape (tokens, k).
        weights: shape (tokens, k), fp32; None for 1.
    """
    if kernels := _kernels(x):
        return kernels.spread(x.contiguous(), places.contiguous(), weights)  # type: ignore[no-any-return]
    copies = x[:, None].expand(*places.shape, -1) if weights is None else (x[:, None].float() * weights[..., None]).to(x.dtype)
    out = x.new_empty(places.numel(), x.shape[1])
    out[places.flatten()] = copies.reshape(out.shape)
    return out


def add_up(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Add up the rows at each token's places, each times a weight, in fp32: (tokens x k, hidden) -> (tokens, hidden)."""
    if kernels := _kernels(rows):
        return kernels.add_up(rows.contiguous(), places.contiguous(), weights)  # type: ignore[no-any-return]
    chosen = rows[places].float()
    return (chosen if weights is None else chosen * weights[..., None]).sum(dim=1).to(rows.dtype)


def weights_gradient(gradient: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Return the gradient of the weights of `add_up`, shape (tokens, k), fp32, from that of its result."""
    if kernels := _kernels(rows):
        return kernels.weights_gradient(gradient.contiguous(), rows.contiguous(), places.contiguous())  # type: ignore[no-any-return]
    return (rows[places].float() * gradient[:, None].float()).sum(dim=-1)
