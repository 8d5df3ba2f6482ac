"""Shapes against published parameter counts, and the small models made of them."""

import pytest

from tprimat.core.errors import ConfigError
from tprimat.core.flops import parameters
from tprimat.core.models import ModelShape, model_shape, models, tiny

PUBLISHED_PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen-2.5-7b": 7_615_616_512,
    "qwen-2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama-2-70b": 68_976_648_192,
    "mistral-7b-v0.3": 7_248_023_552,
    "phi-4": 14_659_507_200,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v2": 235_741_434_880,
}
"""Tensor elements of the published safetensors files, as the model hub counts them; a tied table stored twice counts once."""


@pytest.mark.parametrize(("name", "published"), PUBLISHED_PARAMETERS.items())
def test_a_model_has_exactly_the_weights_of_its_checkpoint(name, published):
    count = parameters(model_shape(name))
    assert count.total == published


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x22b", 141),
        ("deepseek-v3", 671),
        ("deepseek-v2-lite", 15.7),
        ("olmoe-1b-7b", 6.9),
        ("gpt-3-175b", 175),
        ("gpt-462b", 462),
        ("qwen-2.5-72b", 72.7),
    ],
)
def test_a_model_has_about_the_weights_that_its_authors_print(name, billions):
    assert parameters(model_shape(name)).total / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions", "last_digit"),
    [
        ("mixtral-8x7b", 12.9, 0.1),
        ("mixtral-8x22b", 39, 1),
        ("qwen3-30b-a3b", 3.3, 0.1),
        ("qwen3-235b-a22b", 22, 1),
        ("olmoe-1b-7b", 1.3, 0.1),
        ("deepseek-v2", 21, 1),
    ],
)
def test_a_token_uses_the_weights_that_the_authors_print(name, billions, last_digit):
    assert parameters(model_shape(name)).active / 1e9 == pytest.approx(billions, abs=0.55 * last_digit)


def test_kimi_has_the_tensors_of_its_checkpoint_in_fp8():
    """The model hub counts 1,026,470,731,056 elements: a scale for each 128 x 128 block of most matrices, a bias an expert."""
    shape = model_shape("kimi-k2")
    count = parameters(shape)
    others = 2 * shape.vocabulary * shape.hidden  # input table and output layer, which stay in bf16
    scales = (count.total - others) / 128**2
    assert count.total + scales + shape.moe_layers * shape.experts == pytest.approx(1_026_470_731_056, rel=1e-6)
    assert round((count.active - count.embedding) / 1e9) == 32


SUITE_ROWS = [
    ("gpt-30m", "30M", 950_586, 171.8),
    ("gpt-124m", "124M", 298_957, 222.4),
    ("gpt-354m", "354M", 107_626, 228.7),
    ("gpt-773m", "773M", 40_054, 185.8),
    ("gpt-1.5b", "1.44B", 24_195, 208.6),
    ("gpt-3b", "2.65B", 11_980, 190.3),
    ("gpt-7b", "5.24B", 18_381, 578.3),
    ("gpt-13b", "10.12B", 7_941, 482.2),
]
"""The MI350X page: model, printed parameters, tokens/s, TFLOPS."""


@pytest.mark.parametrize(("name", "printed", "tokens_per_second", "teraflops"), SUITE_ROWS)
def test_the_suite_has_the_weights_that_its_page_prints_and_that_its_rates_imply(name, printed, tokens_per_second, teraflops):
    total = parameters(model_shape(name)).total
    assert printed == (f"{total / 1e9:.2f}B" if total >= 1e9 else f"{total / 1e6:.0f}M")
    assert total == pytest.approx(teraflops * 1e12 / tokens_per_second / 6, rel=5e-4)


def test_a_misspelt_model_is_refused_with_the_nearest_names():
    with pytest.raises(ConfigError) as caught:
        model_shape("llama-3.1-9b")
    assert "llama-3.1-8b" in caught.value.fix


@pytest.mark.parametrize("shape", models().values(), ids=lambda shape: shape.name)
def test_a_tiny_model_can_be_split_exactly_as_the_real_one(shape):
    small = tiny(shape)
    for ranks in range(1, 17):
        assert (small.heads % ranks, small.kv_heads % ranks, small.layers % ranks) == (
            shape.heads % ranks,
            shape.kv_heads % ranks,
            shape.layers % ranks,
        )
    assert (small.name, small.head_dim, small.hidden) == (f"{shape.name}-tiny", 4, 4 * shape.heads)
    assert (small.vocabulary, small.context_tokens, small.ffn % 64) == (512, 2048, 0)
    assert (small.experts, small.experts_per_token, small.dense_first_layers) == (
        shape.experts,
        shape.experts_per_token,
        shape.dense_first_layers,
    )
    assert parameters(small).total < parameters(shape).total / 10


def test_half_described_experts_are_refused():
    with pytest.raises(ConfigError, match="only in part") as caught:
        ModelShape(
            name="half", layers=2, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=64, vocabulary=512, context_tokens=64, experts=4
        )
    assert "experts_per_token" in caught.value.fix


def test_heads_that_do_not_divide_are_refused_with_those_that_do():
    with pytest.raises(ConfigError) as refused:
        ModelShape(
            name="m", layers=2, hidden=8, heads=2**31 - 2, kv_heads=4, head_dim=4, ffn=64, vocabulary=512, context_tokens=64
        )
    assert refused.value.fix.startswith("kv_heads: 1, 2, 3, 6, 7, 9, ")
