"""The models that can be asked for by name, and how to make a small one of the same structure."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tprimat.errors import ConfigError
from tprimat.facts.dense_models import LLAMA, QWEN
from tprimat.facts.gpt_models import GPT3, SUITE
from tprimat.facts.moe_models import DEEPSEEK, MIXTRAL, QWEN3_MOE
from tprimat.facts.parameters import ParameterCount, parameters
from tprimat.facts.shape import ModelShape, RopeScaling, padded_vocabulary

__all__ = ["MODELS", "ModelShape", "ParameterCount", "RopeScaling", "model_shape", "padded_vocabulary", "parameters", "tiny"]

MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {shape.name: shape for shape in (*LLAMA, *QWEN, *QWEN3_MOE, *MIXTRAL, *DEEPSEEK, *GPT3, *SUITE)}
)

TINY_HEAD_DIM = 4
TINY_VOCABULARY = 512
TINY_CONTEXT_TOKENS = 2048
TINY_FFN_MULTIPLE = 64


def model_shape(name: str) -> ModelShape:
    """The shape of a known model; case does not matter.

    Raises:
        ConfigError: no such model; names the nearest ones.
    """
    shape = MODELS.get(name.lower())
    if shape is None:
        near = difflib.get_close_matches(name.lower(), MODELS, n=3, cutoff=0.5)
        raise ConfigError(f"There is no model {name!r}.", why="Its shape is not in the table.", fix=", ".join(near or MODELS))
    return shape


def tiny(shape: ModelShape) -> ModelShape:
    """A model of the same structure that a processor trains in seconds.

    Layers, heads, key/value heads and experts stay, so that a split over ranks is as possible, or as impossible, as for
    the real model; widths shrink.
    """
    hidden = shape.heads * TINY_HEAD_DIM
    small = replace(
        shape,
        name=f"{shape.name}-tiny",
        hidden=hidden,
        head_dim=TINY_HEAD_DIM,
        ffn=TINY_FFN_MULTIPLE * -(-hidden * 2 // TINY_FFN_MULTIPLE),
        vocabulary=TINY_VOCABULARY,
        context_tokens=TINY_CONTEXT_TOKENS,
        expert_ffn=None if shape.expert_ffn is None else TINY_FFN_MULTIPLE,
        source=None,
    )
    return small if shape.kv_lora_rank is None else _with_tiny_latent_attention(small)


def _with_tiny_latent_attention(shape: ModelShape) -> ModelShape:
    return replace(
        shape,
        q_lora_rank=4 * TINY_HEAD_DIM,
        kv_lora_rank=2 * TINY_HEAD_DIM,
        nope_head_dim=TINY_HEAD_DIM // 2,
        rope_head_dim=TINY_HEAD_DIM // 2,
        value_head_dim=TINY_HEAD_DIM,
    )
