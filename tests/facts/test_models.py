"""Shapes against published parameter counts, and the small models made of them."""

import pytest

from tprimat.errors import ConfigError
from tprimat.facts.models import MODELS, ModelShape, model_shape, parameters, tiny

PUBLISHED_PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen-2.5-7b": 7_615_616_512,
    "qwen-2.5-32b": 32_763_876_352,
    "qwen-2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
}
"""Tensor elements of the published safetensors files, as the model hub counts them."""


@pytest.mark.parametrize(("name", "published"), PUBLISHED_PARAMETERS.items())
def test_a_model_has_exactly_the_weights_of_its_checkpoint(name, published):
    count = parameters(model_shape(name))
    assert count.total == published


def test_a_dense_model_uses_all_its_weights():
    count = parameters(model_shape("qwen-2.5-7b"))
    assert count.active == count.total
    assert count.experts == 0


def test_the_input_table_is_looked_up_and_not_multiplied():
    count = parameters(model_shape("llama-3.1-8b"))
    norms = 65 * 4096
    assert count.embedding == 128256 * 4096
    assert count.matmul == count.total - count.embedding - norms


def test_a_misspelt_model_is_refused_with_the_nearest_names():
    with pytest.raises(ConfigError) as caught:
        model_shape("llama3.1-8b")
    assert "llama-3.1-8b" in caught.value.fix


def test_case_does_not_matter():
    assert model_shape("Llama-3.1-8B") is MODELS["llama-3.1-8b"]


def test_llama_31_carries_its_long_context_scaling():
    shape = model_shape("llama-3.1-8b")
    scaling = shape.rope_scaling
    values = (scaling.factor, scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_context_tokens)
    assert values == (8, 1, 4, 8192)
    assert (shape.rope_base, shape.context_tokens) == (500000, 131072)


@pytest.mark.parametrize("shape", MODELS.values(), ids=lambda shape: shape.name)
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
    assert parameters(small).total < parameters(shape).total / 25


@pytest.mark.parametrize("shape", MODELS.values(), ids=lambda shape: shape.name)
def test_each_shape_cites_its_source(shape):
    assert shape.source


def test_half_described_experts_are_refused():
    with pytest.raises(ConfigError, match="in part only") as caught:
        ModelShape(
            name="half", layers=2, hidden=8, heads=2, kv_heads=2, head_dim=4, ffn=64, vocabulary=512, context_tokens=64, experts=4
        )
    assert "experts_per_token" in caught.value.fix
