"""Scaled dot-product attention, forward and backward, under each backend that torch can be restricted to.

Causal, 32 query heads, 8 key/value heads, head width 128 unless said: Llama 3.1 8B's. Every length has the same number of tokens.
FLOP are counted causal: scores and weighted values take 2 x 2 s^2 d per head, of which the mask leaves half; backward takes five
such products instead of two, hence 2.5 times as many (FlashAttention-2, arXiv 2307.08691, section 4.1). On ROCm, Flash and
efficient are AOTriton's kernels.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tprimat.probe.case import Call, Case

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LENGTHS, SMALL_LENGTHS = (2048, 4096, 8192, 16384, 32768), (64, 128)
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
NOT_ON_A_CPU = ("cudnn", "efficient")
BACKWARD_FACTOR = 2.5


def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention of tensors (batch, heads, tokens, width); grouped if key and value have fewer heads."""
    grouped = key.shape[1] != query.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class Operands(NamedTuple):
    """Sizes of query (batch, HEADS, length, width), key and value (batch, kv_heads, length, width)."""

    batch: int
    length: int
    kv_heads: int = KV_HEADS
    width: int = HEAD_DIM


def prepare(operands: Operands, backward: bool, device: torch.device) -> Call:
    """Allocate random operands and return one pass over them as a call."""
    batch, length, kv_heads, width = operands
    make = partial(torch.randn, device=device, dtype=torch.bfloat16, requires_grad=backward)
    query = make(batch, HEADS, length, width)
    key, value = make(batch, kv_heads, length, width), make(batch, kv_heads, length, width)
    if not backward:
        return partial(forward, query, key, value)
    result = forward(query, key, value)
    return partial(torch.autograd.grad, result, (query, key, value), torch.randn_like(result), retain_graph=True)


def both_passes(backend: str, operands: Operands) -> list[Case]:
    """Return forward and backward under one backend. Efficient has no grouped queries: it gets as many keys as queries."""
    operands = operands._replace(kv_heads=HEADS) if backend == "efficient" else operands
    batch, length, kv_heads, width = operands
    once = 2 * 2 * batch * HEADS * length**2 * width // 2
    return [
        Case(
            kind=f"attention_{'backward' if backward else 'forward'}",
            variant=backend + " with expanded keys and values" * (kv_heads == HEADS),
            shape={"batch": batch, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": width, "sequence": length},
            dtype="bf16",
            flop=int(once * BACKWARD_FACTOR) if backward else once,
            prepare=partial(prepare, operands, backward),
            context=partial(sdpa_kernel, BACKENDS[backend]),
        )
        for backward in (False, True)
    ]


def cases(*, small: bool, on_cpu: bool) -> list[Case]:
    """Return the backends at every length."""
    lengths = SMALL_LENGTHS if small else LENGTHS
    backends = [name for name in BACKENDS if not (on_cpu and name in NOT_ON_A_CPU)]
    operands = [Operands(max(lengths) // length, length) for length in lengths]
    return [case for one in operands for backend in backends for case in both_passes(backend, one)]
