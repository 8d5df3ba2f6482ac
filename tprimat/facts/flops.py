"""FLOP of training one token, forward and backward, recomputation excluded, in the three conventions that people use.

A matmul of (m, k) with (k, n) takes 2 m n k; its backward pass takes twice that. Attention at sequence length s
multiplies each query with s keys and s weights with values: 2 s (query width + value width) a layer and token.
Sources of the arithmetic: Kaplan et al., arXiv 2001.08361, section 2.1 (6n); Chowdhery et al., PaLM, arXiv 2204.02311,
appendix B (weights plus the whole attention square); Megatron-LM, num_floating_point_operations in
megatron/training/training.py (half the square, since a causal mask never needs the other half).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from tprimat.errors import ConfigError, LayoutError
from tprimat.facts.matmuls import WeightMatrix, attention_matrices, feed_forward_matrices, moe_matrices, output_matrix
from tprimat.facts.parameters import parameters
from tprimat.facts.shape import ModelShape

FlopConvention = Literal["causal", "full", "6n"]

CONVENTIONS: tuple[FlopConvention, ...] = get_args(FlopConvention)

FORWARD_AND_BACKWARD = 3
SEED_FLOP_PER_TOKEN = {"llama-3.1-8b": 6 * 8.0e9, "qwen-2.5-7b": 6 * 7.6e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmShape:
    """One matmul of the forward pass on one rank: (m, k) @ (k, n)."""

    name: str
    m: int
    """Tokens."""
    n: int
    k: int
    repeats: int = 1
    """How often one layer runs it: once for each expert of the layer."""

    @property
    def flop(self) -> int:
        """Of one run."""
        return 2 * self.m * self.n * self.k


def flop_per_token(shape: ModelShape, sequence_tokens: int, convention: FlopConvention = "causal") -> float:
    """FLOP of one token of a sequence, forward and backward, over all layers, without recomputation.

    Args:
        shape: dense or with experts (a token's own experts count), grouped-query or latent attention.
        sequence_tokens: length of the sequences trained on; `6n` does not depend on it.
        convention: `causal`: 6 x weights multiplied with a token + half the attention square; `full`: the whole square;
            `6n`: 6 x all active weights, input table included, attention left out.

    Raises:
        ConfigError: an unknown convention, or a sequence shorter than one token.
    """
    if convention not in CONVENTIONS:
        raise ConfigError(f"{convention!r} is not a way to count FLOP.", fix=f"one of {', '.join(CONVENTIONS)}")
    if sequence_tokens < 1:
        raise ConfigError(f"A sequence of {sequence_tokens} tokens cannot be trained on.", fix="a length of 1 or more")
    count = parameters(shape)
    if convention == "6n":
        return 6.0 * count.active
    square = attention_square_flop_per_token(shape, sequence_tokens)
    return 6.0 * count.matmul + (square / 2 if convention == "causal" else square)


def attention_square_flop_per_token(shape: ModelShape, sequence_tokens: int) -> float:
    """FLOP of scores and weighted values of one token against all tokens of its sequence, forward and backward, all layers."""
    width = shape.heads * (shape.head_dim + shape.value_dim)
    return float(FORWARD_AND_BACKWARD * 2 * sequence_tokens * width * shape.layers)


def seed_flop_per_token(shape_name: str) -> float | None:
    """What the first TPrimat counted: 6 x the size rounded to 0.1 billion, attention left out. None for other models.

    Only for reading its published figures; flop_per_token(..., "6n") is the same convention without the rounding.
    """
    return SEED_FLOP_PER_TOKEN.get(shape_name)


def gemm_shapes(shape: ModelShape, micro_batch: int, sequence: int, tensor_parallel: int = 1) -> list[GemmShape]:
    """Forward matmuls of one layer, then of the output layer, as one tensor-parallel rank runs them.

    With experts it is a layer of experts, and each expert gets its even share of tokens (rounded up). Backward runs each
    matmul twice more, with (m, n, k) permuted.

    Raises:
        LayoutError: a matrix or the heads cannot be divided by tensor_parallel.
    """
    _check_split(shape, tensor_parallel)
    layer = attention_matrices(shape) + (moe_matrices(shape) or feed_forward_matrices(shape))
    tokens = micro_batch * sequence
    return [_gemm(matrix, tokens, tensor_parallel) for matrix in [*layer, output_matrix(shape)]]


def _check_split(shape: ModelShape, ranks: int) -> None:
    parts = {"attention heads": shape.heads}
    if shape.kv_lora_rank is None:
        parts["key/value heads"] = shape.kv_heads
    parts |= {"feed-forward columns": shape.expert_ffn or shape.ffn, "vocabulary rows": shape.vocabulary}
    common = math.gcd(*parts.values())
    for what, size in parts.items():
        if ranks < 1 or size % ranks:
            raise LayoutError(
                f"{shape.name} cannot be split over {ranks} tensor-parallel ranks.",
                why=f"It has {size} {what}; each rank needs an equal, whole number of them.",
                fix=", ".join(str(divisor) for divisor in range(1, common + 1) if common % divisor == 0),
            )


def _gemm(matrix: WeightMatrix, tokens: int, ranks: int) -> GemmShape:
    return GemmShape(
        name=matrix.name,
        m=-(-tokens * matrix.active_copies // matrix.copies),
        n=matrix.outputs // (ranks if matrix.split == "outputs" else 1),
        k=matrix.inputs // (ranks if matrix.split == "inputs" else 1),
        repeats=matrix.copies,
    )
