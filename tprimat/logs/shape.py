"""The shape of the model by Megatron's arguments, and what contradicts a shape that somebody names."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tprimat.core.errors import ConfigError
from tprimat.core.flops import parameters
from tprimat.core.models import ModelShape, padded_vocabulary
from tprimat.logs.arguments import OTHER_WORK
from tprimat.logs.fields import NONE, number, number_of, switch_of, truth, whole

VOCABULARY_TOLERANCE = 0.05
"""Frameworks pad the vocabulary, and tokenizers add words."""
BILLIONS_TOLERANCE, HALF_A_DIGIT = 0.05, 0.005
"""Of the number of parameters that Megatron estimates by a formula, and prints with two decimals."""
MAY_BE_NONE = {"num_experts", "q_lora_rank", "moe_shared_expert_intermediate_size"}
"""Arguments whose None describes the model; any other None is a default that Megatron has not filled in yet."""
REPEATED = re.compile(r"\[([01])\]\s*\*\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Difference:
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
        return sum(int(times) for digit, times in repeats if digit == "0")
    if "[" in text:
        return len(re.findall(r"\b0\b", text))
    every = whole(text)
    return None if not every else layers - -(-layers // every)


def shape_of_arguments(arguments: Mapping[str, str]) -> ModelShape:
    """Return the shape that Megatron's arguments describe, named by its size.

    Raises:
        ConfigError: the log does not print all of it, or it is not a transformer with only attention layers.
    """
    needed = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "swiglu")
    missing = [name for name in needed if name not in arguments]
    vocabulary = number_of(arguments, "padded_vocab_size") or number_of(arguments, "vocab_size")
    if vocabulary is None:
        missing.append("padded_vocab_size")
    if number_of(arguments, "num_experts") and "moe_layer_freq" not in arguments:
        missing.append("moe_layer_freq")
    if missing:
        raise ConfigError(
            "The log does not print the model's shape.",
            why=f"It lacks {', '.join(missing)}.",
            fix="--model-name with the model that ran",
        )
    _refuse_uncounted_layers(arguments)
    layers, hidden, heads = (number_of(arguments, name) or 0 for name in ("num_layers", "hidden_size", "num_attention_heads"))
    grouped = switch_of(arguments, "group_query_attention") is not False
    shape = ModelShape(
        name="log",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=(number_of(arguments, "num_query_groups") if grouped else None) or heads,
        head_dim=number_of(arguments, "kv_channels") or hidden // max(heads, 1),
        ffn=number_of(arguments, "ffn_hidden_size") or 0,
        vocabulary=vocabulary or 0,
        context_tokens=number_of(arguments, "max_position_embeddings") or number_of(arguments, "seq_length") or 1,
        gated=switch_of(arguments, "swiglu") or False,
        norm="layernorm" if arguments.get("normalization") == "LayerNorm" else "rmsnorm",
        qkv_bias=switch_of(arguments, "add_qkv_bias") or False,
        qk_norm=switch_of(arguments, "qk_layernorm") or False,
        linear_bias=switch_of(arguments, "add_bias_linear") or False,
        tied_embeddings=switch_of(arguments, "untie_embeddings_and_output_weights") is False,
        position="learned" if arguments.get("position_embedding_type", "").endswith("absolute") else "rope",
    )
    shape = with_latent_attention(with_experts(shape, arguments), arguments)
    return replace(shape, name=size_name(shape))


def _refuse_uncounted_layers(arguments: Mapping[str, str]) -> None:
    """Refuse a model with layers whose FLOP are not counted."""
    if other := other_work(arguments):
        raise ConfigError(
            f"The log is from {OTHER_WORK[other]}.",
            why=f"{other} is {arguments[other]}; its FLOP are not counted here.",
            fix="a log of training all weights, with full attention",
        )
    if number_of(arguments, "mtp_num_layers"):
        raise ConfigError(
            "The log is from a model with multi-token prediction.",
            why=f"mtp_num_layers is {arguments['mtp_num_layers']}; the FLOP of its further layers are not counted here.",
            fix="a log without it",
        )


def other_work(arguments: Mapping[str, str]) -> str | None:
    """Return the argument that asks for work whose FLOP are not those of full attention; None where none does."""
    asked = (name for name in OTHER_WORK if arguments.get(name, "None") not in NONE)
    return next((name for name in asked if truth(arguments[name]) is not False), None)


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


def with_experts(shape: ModelShape, arguments: Mapping[str, str]) -> ModelShape:
    """Add the experts that the arguments describe."""
    experts = number_of(arguments, "num_experts")
    if not experts:
        return shape
    width = number_of(arguments, "moe_ffn_hidden_size") or shape.ffn
    shared = number_of(arguments, "moe_shared_expert_intermediate_size") or 0
    if shared % width:
        raise ConfigError(
            f"The log's shared experts are {shared} wide, not a multiple of an expert's {width}.",
            why="A shape holds whole shared experts.",
            fix="--model-name with the model that ran",
        )
    return replace(
        shape,
        experts=experts,
        experts_per_token=number_of(arguments, "moe_router_topk") or 1,
        expert_ffn=width,
        shared_experts=shared // width,
        dense_first_layers=dense_layers_of(arguments) or 0,
    )


def with_latent_attention(shape: ModelShape, arguments: Mapping[str, str]) -> ModelShape:
    """Add the latent attention that the arguments describe."""
    if not switch_of(arguments, "multi_latent_attention"):
        return shape
    nope, rope = number_of(arguments, "qk_head_dim"), number_of(arguments, "qk_pos_emb_head_dim")
    return replace(
        shape,
        kv_heads=shape.heads,
        head_dim=(nope or 0) + (rope or 0),
        q_lora_rank=number_of(arguments, "q_lora_rank"),
        kv_lora_rank=number_of(arguments, "kv_lora_rank"),
        nope_head_dim=nope,
        rope_head_dim=rope,
        value_head_dim=number_of(arguments, "v_head_dim"),
    )


def size_name(shape: ModelShape) -> str:
    """Return a name for a shape without one: 'dense-8.0b' or 'moe-15.7b-a2.7b', total and active parameters."""
    count = parameters(shape)
    total, active = f"{count.total / 1e9:.1f}b", f"{count.active / 1e9:.1f}b"
    return f"dense-{total}" if shape.experts is None else f"moe-{total}-a{active}"


def differences(arguments: Mapping[str, str], shape: ModelShape) -> list[Difference]:
    """List the arguments that contradict a shape; an argument that the log does not print contradicts nothing."""
    sizes = (
        Difference(name, number_of(arguments, name) or None, expected)
        for name, expected in expected_sizes(arguments, shape)
        if name in arguments
    )
    different = [one for one in sizes if one.logged != one.expected and (one.logged is not None or one.argument in MAY_BE_NONE)]
    for name, expected in (("swiglu", shape.gated), ("multi_latent_attention", shape.kv_lora_rank is not None)):
        switch = switch_of(arguments, name)
        if switch not in {None, expected}:
            different.append(Difference(name, switch, expected))
    dense = dense_layers_of(arguments)
    if shape.experts and dense is not None and "moe_layer_freq" in arguments and dense != shape.dense_first_layers:
        different.append(Difference("moe_layer_freq", f"{dense} dense layers", f"{shape.dense_first_layers} dense layers"))
    if other := other_work(arguments):
        different.append(Difference(other, arguments[other], None))
    if further := number_of(arguments, "mtp_num_layers"):
        different.append(Difference("mtp_num_layers", further, 0))
    billions = number(arguments.get("parameters_in_billions"))
    total = parameters(replace(shape, vocabulary=padded_vocabulary(shape))).total / 1e9
    if billions and shape.experts is None and abs(billions - total) > BILLIONS_TOLERANCE * total + HALF_A_DIGIT:
        different.append(Difference("parameters_in_billions", billions, round(total, 2)))
    vocabulary, expected_rows = number_of(arguments, "padded_vocab_size"), padded_vocabulary(shape)
    if vocabulary and abs(vocabulary / expected_rows - 1) > VOCABULARY_TOLERANCE:
        different.append(Difference("padded_vocab_size", vocabulary, expected_rows))
    return different


def expected_sizes(arguments: Mapping[str, str], shape: ModelShape) -> Iterator[tuple[str, int | None]]:
    """Yield the whole arguments that a shape implies, where Megatron uses them: it prints unused ones with their defaults."""
    yield "num_layers", shape.layers
    yield "hidden_size", shape.hidden
    yield "num_attention_heads", shape.heads
    yield "num_experts", shape.experts
    has_experts = shape.experts is not None and bool(number_of(arguments, "num_experts"))
    if shape.dense_layers and (shape.experts is not None or not number_of(arguments, "num_experts")):
        yield "ffn_hidden_size", shape.ffn
    if has_experts:
        yield "moe_router_topk", shape.experts_per_token
        if number_of(arguments, "moe_ffn_hidden_size"):
            yield "moe_ffn_hidden_size", shape.expert_ffn
        yield "moe_shared_expert_intermediate_size", shape.shared_experts * (shape.expert_ffn or 0) or None
    if switch_of(arguments, "multi_latent_attention"):
        yield "q_lora_rank", shape.q_lora_rank
        yield "kv_lora_rank", shape.kv_lora_rank
        yield "qk_head_dim", shape.nope_head_dim
        yield "qk_pos_emb_head_dim", shape.rope_head_dim
        yield "v_head_dim", shape.value_head_dim
        return
    if switch_of(arguments, "group_query_attention") is not False:
        yield "num_query_groups", shape.kv_heads
    if number_of(arguments, "kv_channels"):
        yield "kv_channels", shape.head_dim
