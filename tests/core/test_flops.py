"""FLOP counts against published figures and against a list of matmuls written down by hand."""

import pytest

from tprimat.core.errors import LayoutError
from tprimat.core.flops import flop_per_token, gemm_shapes
from tprimat.core.models import model_shape

LLAMA = model_shape("llama-3.1-8b")


@pytest.mark.parametrize(
    ("model", "sequence", "convention", "gigaflop"),
    [
        ("llama-3.1-8b", 2048, "causal", 46.64),
        ("llama-3.1-8b", 2048, "full", 48.25),
        ("llama-3.1-8b", 2048, "6n", 48.18),
        ("llama-3.1-8b", 8192, "causal", 51.47),
        ("llama-3.1-8b", 8192, "full", 57.91),
        ("llama-3.1-8b", 8192, "6n", 48.18),
        ("qwen-2.5-7b", 2048, "causal", 43.65),
        ("qwen-2.5-7b", 2048, "full", 44.89),
        ("qwen-2.5-7b", 2048, "6n", 45.69),
    ],
)
def test_a_token_costs_what_other_trainers_say(model, sequence, convention, gigaflop):
    assert flop_per_token(model_shape(model), sequence, convention) / 1e9 == pytest.approx(gigaflop, abs=0.006)


def test_a_dense_model_costs_the_sum_of_its_matmuls():
    """Llama 3.1 8B, 2,048 tokens, each matmul of the forward pass as (m, n, k), attention a head at a time."""
    tokens, layers, heads = 2048, 32, 32
    layer = [
        (tokens, 4096, 4096),
        (tokens, 1024, 4096),
        (tokens, 1024, 4096),
        (tokens, 4096, 4096),
        (tokens, 14336, 4096),
        (tokens, 14336, 4096),
        (tokens, 4096, 14336),
    ]
    square = [(tokens, tokens, 128), (tokens, 128, tokens)]
    weights = layers * sum(2 * m * n * k for m, n, k in layer) + 2 * tokens * 128256 * 4096
    attention = layers * heads * sum(2 * m * n * k for m, n, k in square)
    assert flop_per_token(LLAMA, tokens, "full") == pytest.approx(3 * (weights + attention) / tokens, rel=1e-12)
    assert flop_per_token(LLAMA, tokens, "causal") == pytest.approx(3 * (weights + attention / 2) / tokens, rel=1e-12)


def test_a_mixture_of_experts_costs_what_its_chosen_experts_cost():
    """Mixtral 8x7B: two of eight experts and the router; no weight of the other six."""
    layer = [(4096, 6144), (4096, 4096), (4096, 8)] + 2 * [(4096, 14336), (4096, 14336), (14336, 4096)]
    forward = 32 * sum(2 * n * k for n, k in layer) + 2 * 4096 * 32000 + 32 * 32 * 2 * (2 * 4096 * 128)
    assert flop_per_token(model_shape("mixtral-8x7b"), 4096, "full") == pytest.approx(3 * forward, rel=1e-12)


def test_latent_attention_costs_its_low_rank_products_and_unequal_heads():
    """DeepSeek-V3 at 4,096 tokens, matrix by matrix from its paper: 61 layers, of which 3 dense; 8 + 1 experts a token."""
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    dense, moe = 3 * 7168 * 18432, 9 * 3 * 7168 * 2048 + 7168 * 256
    weights = 61 * attention + 3 * dense + 58 * moe + 7168 * 129280
    square = 61 * 128 * (2 * 4096 * 192 + 2 * 4096 * 128)
    assert flop_per_token(model_shape("deepseek-v3"), 4096, "full") == pytest.approx(3 * (2 * weights + square), rel=1e-12)


def test_the_matmuls_of_a_layer_are_split_as_megatron_splits_them():
    shapes = {gemm.name: (gemm.m, gemm.n, gemm.k, gemm.repeats) for gemm in gemm_shapes(LLAMA, 2, 2048, 4)}
    assert shapes == {
        "qkv": (4096, 1536, 4096, 1),
        "attention_output": (4096, 4096, 1024, 1),
        "mlp_up": (4096, 7168, 4096, 1),
        "mlp_down": (4096, 4096, 3584, 1),
        "output": (4096, 32064, 4096, 1),
    }


def test_a_split_that_cuts_a_head_is_refused_with_the_reason():
    for degree in (7, 8):
        with pytest.raises(LayoutError, match="cannot be split over") as caught:
            gemm_shapes(model_shape("qwen-2.5-7b"), 1, 2048, degree)
        assert (caught.value.why, caught.value.fix) == (
            "Each needs whole heads, of 28 and 4, and equal shares of width and vocabulary.",
            "1, 2, 4",
        )
