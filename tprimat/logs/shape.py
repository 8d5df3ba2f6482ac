"""The shape of the model by Megatron's arguments, and what contradicts a shape that somebody names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tprimat.core.errors import ConfigError
from tprimat.core.flops import parameters
from tprimat.core.models import ModelShape, padded_vocabulary
from tprimat.logs.arguments import NAMES, OTHER_WORK
from tprimat.logs.fields import NONE, count, number, number_of, switch_of, truth, whole

ARGUMENTS: Mapping[str, str] = NAMES["shape"]
"""Field of a shape -> the argument that states it."""
WORDS = {"dense_first_layers": "{} dense layers", "shared_experts": "{:g} shared experts"}
OF_EXPERTS = ("experts_per_token", "expert_ffn", "shared_experts", "dense_first_layers")
OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "nope_head_dim", "rope_head_dim", "value_head_dim")

REPEATED = re.compile(r"\[([01])\]\s*\*\s*(\d+)")


@dataclass(frozen=True, slots=True)
class ShapeDifference:
    """An argument in the log that a shape contradicts."""

    argument: str
    logged: object
    expected: object
    """None: the model has no such thing."""

    def __str__(self) -> str:
        expected = "absent" if self.expected is None else self.expected
        return f"{self.argument} is {self.logged} in the log and {expected} in the model"


def dense_layers_of(arguments: Mapping[str, str]) -> int | None:
    """Return the layers without experts of a model with experts.

    moe_layer_freq is N (a layer in N has experts), a list with a 0 for each dense layer, or '[0]*3+[1]*58'.
    """
    layers, text = number_of(arguments, "num_layers"), arguments.get("moe_layer_freq", "1")
    if layers is None:
        return None
    if repeats := REPEATED.findall(text):
        return sum(count(times) for digit, times in repeats if digit == "0")
    if "[" in text:
        return len(re.findall(r"\b0\b", text))
    every = whole(text)
    return None if not every else layers - -(-layers // every)


def stated_fields(arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a shape that arguments state, where Megatron uses them: it prints unused ones with their defaults."""
    sizes = {field: number_of(arguments, name) for field, name in ARGUMENTS.items() if name in arguments}
    has_experts, latent = bool(sizes.get("experts")), switch_of(arguments, "multi_latent_attention")
    unused = (() if has_experts else OF_EXPERTS) + (("kv_heads", "head_dim") if latent else OF_LATENTS)
    stated: dict[str, Any] = {field: size for field, size in sizes.items() if size and field not in unused}
    if "experts" in sizes:
        stated["experts"] = sizes["experts"] or None
    if latent and "q_lora_rank" in sizes:
        stated["q_lora_rank"] = sizes["q_lora_rank"] or None
    if switch_of(arguments, "group_query_attention") is False:
        stated.pop("kv_heads", None)
    if (gated := switch_of(arguments, "swiglu")) is not None:
        stated["gated"] = gated
    if latent is False:
        stated["kv_lora_rank"] = None
    if has_experts:
        stated["dense_first_layers"] = dense_layers_of(arguments)
        width = stated.get("expert_ffn") or stated.get("ffn")
        if "shared_experts" in sizes and width:
            stated["shared_experts"] = (sizes["shared_experts"] or 0) / width
        if not stated["dense_first_layers"]:
            stated.pop("ffn", None)
    return {field: value for field, value in stated.items() if field != "dense_first_layers" or "moe_layer_freq" in arguments}


def shape_of_arguments(arguments: Mapping[str, str]) -> ModelShape:
    """Return the shape that Megatron's arguments describe, named by its size: 'dense-8.0b', 'moe-15.7b-a2.7b'.

    Raises ConfigError: the log does not print all of it, or it is not a transformer with only attention layers.
    """
    needed = ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "swiglu"]
    needed += ["moe_layer_freq"] if number_of(arguments, "num_experts") else []
    missing = [name for name in needed if name not in arguments]
    vocabulary = number_of(arguments, "padded_vocab_size") or number_of(arguments, "vocab_size")
    if missing or vocabulary is None:
        raise ConfigError(
            "The log does not print the model's shape.",
            why=f"It lacks {', '.join([*missing, *(['padded_vocab_size'] if vocabulary is None else [])])}.",
            fix="--model-name with the model that ran",
        )
    if other := other_work(arguments):
        raise ConfigError(
            f"The log is from {OTHER_WORK[other]}.",
            why=f"{other} is {arguments[other]}; its FLOP are not counted here.",
            fix="a log of training all weights, with full attention",
        )
    stated = {"ffn": number_of(arguments, "ffn_hidden_size") or 0, "layers": 0, "hidden": 0, "heads": 0} | stated_fields(
        arguments
    )
    if stated.get("experts"):
        stated["expert_ffn"] = stated.get("expert_ffn") or stated["ffn"]
        stated["shared_experts"] = round(stated.get("shared_experts") or 0)
        stated["experts_per_token"] = stated.get("experts_per_token") or 1
        stated["dense_first_layers"] = stated.get("dense_first_layers") or 0
    if stated.get("kv_lora_rank"):
        stated |= {"head_dim": (stated.get("nope_head_dim") or 0) + (stated.get("rope_head_dim") or 0)}
    others = {
        "vocabulary": vocabulary,
        "kv_heads": stated["heads"],
        "head_dim": stated["hidden"] // max(stated["heads"], 1),
        "context_tokens": number_of(arguments, "max_position_embeddings") or number_of(arguments, "seq_length") or 1,
        "norm": "layernorm" if arguments.get("normalization") == "LayerNorm" else "rmsnorm",
        "qkv_bias": switch_of(arguments, "add_qkv_bias") or False,
        "qk_norm": switch_of(arguments, "qk_layernorm") or False,
        "linear_bias": switch_of(arguments, "add_bias_linear") or False,
        "tied_embeddings": switch_of(arguments, "untie_embeddings_and_output_weights") is False,
        "position": "learned" if arguments.get("position_embedding_type", "").endswith("absolute") else "rope",
    }
    shape = ModelShape(**{"name": "log", **others, **stated})
    total, active = (f"{number / 1e9:.1f}b" for number in (parameters(shape).total, parameters(shape).active))
    return replace(shape, name=f"dense-{total}" if shape.experts is None else f"moe-{total}-a{active}")


def other_work(arguments: Mapping[str, str]) -> str | None:
    """Return the argument that asks for work whose FLOP are not those of full attention; None where none does."""
    asked = (name for name in OTHER_WORK if arguments.get(name, "None") not in NONE)
    return next((name for name in asked if truth(arguments[name]) is not False and number(arguments[name]) != 0), None)


def packs(arguments: Mapping[str, str]) -> bool:
    """Whether a sequence holds several documents, at whose ends attention ends."""
    switches = ("reset_attention_mask", "sft", "use_packed_attention")
    return any(switch_of(arguments, name) for name in switches) or bool(number_of(arguments, "packed_sequence_size"))


def pads(arguments: Mapping[str, str]) -> bool:
    """Whether sequences are those of fine-tuning, which padding fills up."""
    return bool(switch_of(arguments, "sft")) or arguments.get("stage") == "sft"


def cautions_of(arguments: Mapping[str, str]) -> list[str]:
    """Say which arguments make tokens or FLOP of a step fewer than batch, sequence and shape do."""
    cautions = []
    if packs(arguments):
        cautions.append("sequences are packed: attention ends at each document, and FLOP and MFU count that of whole sequences")
    if pads(arguments):
        cautions.append("sequences of fine-tuning are padded: tokens include padding")
    if (capacity := arguments.get("moe_expert_capacity_factor", "None")) not in NONE:
        cautions.append(
            f"experts drop choices above a capacity of {capacity}, and the log does not say how many: no FLOP, no MFU"
        )
    return cautions


def counted_otherwise(arguments: Mapping[str, str], shape: ModelShape) -> list[ShapeDifference]:
    """List the billions of parameters that are not those of a shape: of its layers, and of all, which may be printed in parts."""
    count = parameters(replace(shape, vocabulary=padded_vocabulary(shape)))
    layers, embeddings = (number(arguments.get(f"{part}_in_billions")) for part in ("layers", "embeddings"))
    total = number(arguments.get("parameters_in_billions"))
    if total is None and layers and embeddings:
        total = layers + embeddings
    expected = {"parameters": count.total / 1e9, "layers": (count.total - count.embedding - count.output) / 1e9}
    return [
        ShapeDifference(f"{name}_in_billions", logged, round(expected[name], 2))
        for name, logged in (("parameters", total), ("layers", layers))
        if logged and abs(logged - expected[name]) > 0.01 * expected[name] + 0.005  # a formula's, in two decimals
    ]


def differences(arguments: Mapping[str, str], shape: ModelShape) -> list[ShapeDifference]:
    """List the arguments that contradict a shape; an argument that the log does not print contradicts nothing."""
    different = []
    for name, logged in stated_fields(arguments).items():
        expected = getattr(shape, name)
        uncompared = (shape.experts is None and name in OF_EXPERTS) or (name == "ffn" and not shape.dense_layers)
        if logged != expected and not uncompared:
            words = WORDS.get(name, "{}").format
            different.append(ShapeDifference(ARGUMENTS[name], words(logged), None if expected is None else words(expected)))
    others = (other_work(arguments), "load balancing loss" if shape.experts is None else None)
    different += [ShapeDifference(name, arguments[name], None) for name in others if name and name in arguments]
    if shape.kv_lora_rank is None:
        different += counted_otherwise(arguments, shape)
    vocabulary, expected_rows = number_of(arguments, "padded_vocab_size"), padded_vocabulary(shape)
    if vocabulary and abs(vocabulary / expected_rows - 1) > 0.05:  # frameworks pad, and tokenizers add words
        different.append(ShapeDifference("padded_vocab_size", vocabulary, expected_rows))
    return different
