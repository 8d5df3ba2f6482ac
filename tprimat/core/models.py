"""Model shapes: the dimensions of a transformer, the table of known models, and small models of the same structure.

The rows are in tprimat/data/models.yaml.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType

from tprimat.core.errors import ConfigError
from tprimat.core.rows import RefuseUnknownKeys, read_rows

VOCABULARY_MULTIPLE = 128
"""Megatron-LM's make_vocab_size_divisible_by: the embedding is padded to it, in the same way whatever the layout."""
LARGEST = 2**31
"""Of any dimension: products of several stay within floating point."""
MOST_PARTS = 100_000
"""Of layers and experts, whose divisors are listed."""
ROUTER_SCORES = ("softmax", "sigmoid")
TINY_HEAD_DIM = 4
TINY_VOCABULARY = 512
TINY_CONTEXT_TOKENS = 2048
TINY_FFN_MULTIPLE = 64
TINY_EXPERT_FFN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling(RefuseUnknownKeys):
    """Llama 3.1's rescaling of rotary frequencies for long contexts."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_tokens: int


def divisors(number: int) -> list[int]:
    """Return the divisors in ascending order; none of 0."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def listed_divisors(number: int) -> str:
    """Return the divisors as the fix of an error lists them."""
    return ", ".join(map(str, divisors(number)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(RefuseUnknownKeys):
    """The dimensions of a decoder-only transformer.

    Dense unless `experts` is given; grouped-query attention unless `kv_lora_rank` (multi-head latent attention) is given.

    Raises:
        ConfigError: a dimension is not positive, the key/value heads do not divide the heads, or some but not all dimensions of
            the experts, or of latent attention, are given.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Of queries and keys: with latent attention nope_head_dim + rope_head_dim."""
    ffn: int
    """Inner width of one (dense) feed-forward block."""
    vocabulary: int
    """Rows of the embedding, padding of the published checkpoint included."""
    context_tokens: int
    """Longest sequence that the published configuration allows."""
    gated: bool = True
    """SwiGLU (three matrices) instead of a plain two-matrix feed-forward."""
    norm: str = "rmsnorm"
    norm_epsilon: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    linear_bias: bool = False
    """Biases on every linear layer except the output layer, as in GPT-3."""
    tied_embeddings: bool = False
    position: str = "rope"
    """rope or learned."""
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    experts: int | None = None
    """Routed experts in one layer; None for a dense model."""
    experts_per_token: int | None = None
    expert_ffn: int | None = None
    """Inner width of one expert, routed or shared."""
    shared_experts: int = 0
    """Experts that every token passes, in addition to the routed ones."""
    dense_first_layers: int = 0
    """Leading layers whose feed-forward is dense although the model has experts."""
    router_score: str = "softmax"
    """softmax or sigmoid: what turns the router's logits into scores, of which the highest choose the experts."""
    router_normalized: bool = True
    """The weights of a token's experts sum to 1 (before router_scale)."""
    router_scale: float = 1.0
    """Multiplies the weights of a token's experts."""
    router_bias: bool = False
    """A bias of each expert takes part in the choice and is moved against its load after each step (arXiv 2408.15664)."""
    router_groups: int | None = None
    """Groups of experts, of which a token uses the best router_best_groups only."""
    router_best_groups: int | None = None
    balance_loss: float = 0.0
    """Coefficient of the load-balancing loss."""
    balance_by_sequence: bool = False
    """That loss judges each sequence by itself instead of a whole micro-batch."""
    q_lora_rank: int | None = None
    """None in a model with kv_lora_rank: one matrix makes the queries, as in DeepSeek-V2-Lite."""
    kv_lora_rank: int | None = None
    nope_head_dim: int | None = None
    """Part of a query and key head without rotary position."""
    rope_head_dim: int | None = None
    value_head_dim: int | None = None
    source: str | None = None
    """Model card, configuration file or paper of the figures."""

    def __post_init__(self) -> None:
        self._check_dimensions()
        self._check_router()
        experts = {"experts": self.experts, "experts_per_token": self.experts_per_token, "expert_ffn": self.expert_ffn}
        latent = {
            "kv_lora_rank": self.kv_lora_rank,
            "nope_head_dim": self.nope_head_dim,
            "rope_head_dim": self.rope_head_dim,
            "value_head_dim": self.value_head_dim,
        }
        if self.q_lora_rank is not None and self.kv_lora_rank is None:
            raise ConfigError(
                f"Model {self.name} has q_lora_rank but no kv_lora_rank.",
                why="Only latent attention compresses its queries.",
                fix="add kv_lora_rank, or remove q_lora_rank",
            )
        groups = {"router_groups": self.router_groups, "router_best_groups": self.router_best_groups}
        for what, group in (("experts", experts), ("latent attention", latent), ("router's groups", groups)):
            missing = [key for key, value in group.items() if value is None]
            if missing and len(missing) < len(group):
                raise ConfigError(
                    f"Model {self.name} describes its {what} in part only.",
                    why=f"{', '.join(group)} belong together.",
                    fix=f"add {', '.join(missing)}, or remove the others",
                )

    def _check_dimensions(self) -> None:
        for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary", "context_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"Model {self.name} has {key}: {getattr(self, key)}.", why="It must be 1 or more.")
        for key in (field.name for field in fields(self)):
            value = getattr(self, key)
            most = MOST_PARTS if key in {"layers", "experts"} else LARGEST
            if isinstance(value, int | float) and not 0 <= value <= most:
                raise ConfigError(f"Model {self.name} has {key}: {value!r:.20}.", why=f"It must be from 0 to {most:,}.")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"Model {self.name} has {self.heads} heads and {self.kv_heads} key/value heads.",
                why="Each key/value head serves the same number of heads.",
                fix=f"kv_heads: {listed_divisors(self.heads)}",
            )

    def _check_router(self) -> None:
        if self.router_score not in ROUTER_SCORES:
            raise ConfigError(
                f"Model {self.name} has router_score: {self.router_score!r:.40}.", fix=f"one of {', '.join(ROUTER_SCORES)}"
            )
        if self.router_bias and self.router_score != "sigmoid":
            why = "Expert bias for aux-loss-free routing only supports sigmoid score function."
            raise ConfigError(
                f"Model {self.name} has router_bias and {self.router_score} scores.", why=why, fix="router_score: sigmoid"
            )
        self._check_experts()
        if self.dense_first_layers > self.layers:
            what = f"Model {self.name} has {self.layers} layers, of which the first {self.dense_first_layers} are dense."
            raise ConfigError(what, fix=f"dense_first_layers: 0 to {self.layers}")
        self._check_groups()

    def _check_experts(self) -> None:
        """Check that there are experts, each with a width, and as many as a token chooses."""
        if self.experts is None:
            for key in ("shared_experts", "dense_first_layers", "router_bias", "router_groups"):
                if getattr(self, key):
                    raise ConfigError(
                        f"Model {self.name} has {key}: {str(getattr(self, key)).lower()}, and no experts.",
                        why="It would be ignored.",
                        fix=f"add experts, experts_per_token and expert_ffn, or remove {key}",
                    )
        for key in ("experts", "expert_ffn"):
            if getattr(self, key) == 0:
                raise ConfigError(
                    f"Model {self.name} has {key}: 0.", why="It must be 1 or more.", fix="leave it out without experts"
                )
        chosen = self.experts_per_token
        if self.experts is not None and chosen is not None and not 1 <= chosen <= self.experts:
            what = f"Model {self.name} has {self.experts} experts and {chosen} for each token."
            raise ConfigError(what, why="A token chooses different experts.", fix=f"experts_per_token: 1 to {self.experts}")

    def _check_groups(self) -> None:
        """Check what Megatron-Core asserts of groups, in its words, and that the best groups have the experts that are chosen."""
        groups, best, experts, chosen = self.router_groups, self.router_best_groups, self.experts, self.experts_per_token
        if groups is None or best is None or experts is None or chosen is None:
            return
        name = f"Model {self.name}"
        if groups < 1 or experts % groups:
            what = f"{name}: num_moe_experts ({experts}) should be divisible by moe_router_num_groups ({groups})."
            why = "Groups have the same number of experts."
            raise ConfigError(what, why=why, fix=f"router_groups: {listed_divisors(experts)}")
        if not 1 <= best <= groups:
            what = f"{name}: moe_router_group_topk ({best}) should be smaller than moe_router_num_groups ({groups}), or equal."
            raise ConfigError(what, why="A token uses the best of these groups.", fix=f"router_best_groups: 1 to {groups}")
        if chosen % best:
            what = f"{name}: moe_router_topk ({chosen}) is not a multiple of moe_router_group_topk ({best})."
            why = f"A group is judged by its best {chosen} / {best} experts."
            raise ConfigError(what, why=why, fix=f"router_best_groups: {listed_divisors(chosen)}")
        if chosen > best * (experts // groups):
            what = f"{name}: a token chooses {chosen} experts, and its {best} best groups have {best * (experts // groups)}."
            why = f"Each of {groups} groups has {experts // groups} of {experts} experts."
            raise ConfigError(what, why=why, fix="fewer router_groups, or more router_best_groups")

    @property
    def moe_layers(self) -> int:
        """Layers whose feed-forward is a mixture of experts."""
        return 0 if self.experts is None else self.layers - self.dense_first_layers

    @property
    def dense_layers(self) -> int:
        """Layers with one dense feed-forward block."""
        return self.layers - self.moe_layers

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim


@cache
def models() -> Mapping[str, ModelShape]:
    """Return all shapes of the table by name.

    Raises:
        ConfigError: a row of models.yaml is not valid.
    """
    return MappingProxyType({shape.name.lower(): shape for shape in read_rows("models.yaml", "models", ModelShape)})


def model_shape(name: str) -> ModelShape:
    """Return the shape of a known model; case does not matter.

    Raises:
        ConfigError: no such model; names the nearest ones.
    """
    known = models()
    shape = known.get(name.lower())
    if shape is None:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        raise ConfigError(f"There is no model {name!r}.", why="Its shape is not in the table.", fix=", ".join(near or known))
    return shape


@cache
def family_of(name: str) -> str | None:
    """Return the first word of the name of a model, such as qwen3 of qwen3_moe; None where no model of the table has it."""
    first = _first_word(name)
    return first if first in {_first_word(known) for known in models()} else None


def _first_word(name: str) -> str:
    return name.lower().replace("_", "-").partition("-")[0]


def tiny(shape: ModelShape) -> ModelShape:
    """Return a model of the same structure that a CPU trains in seconds.

    Layers, heads, key/value heads and experts stay, so that it can be split over ranks exactly where the real model can;
    widths shrink.
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
        expert_ffn=None if shape.expert_ffn is None else TINY_EXPERT_FFN,
        source=None,
    )
    return small if shape.kv_lora_rank is None else _with_tiny_latent_attention(small)


def _with_tiny_latent_attention(shape: ModelShape) -> ModelShape:
    return replace(
        shape,
        q_lora_rank=None if shape.q_lora_rank is None else 4 * TINY_HEAD_DIM,
        kv_lora_rank=2 * TINY_HEAD_DIM,
        nope_head_dim=TINY_HEAD_DIM // 2,
        rope_head_dim=TINY_HEAD_DIM // 2,
        value_head_dim=TINY_HEAD_DIM,
    )


def padded_vocabulary(shape: ModelShape) -> int:
    """Return the number of rows of the embedding as trained."""
    return -(-shape.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def split_counts(shape: ModelShape) -> dict[str, int]:
    """Return what tensor parallelism divides: every rank has whole heads, and equal shares of width and vocabulary."""
    return {
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "ffn_hidden_size": shape.ffn,
        "padded_vocab_size": padded_vocabulary(shape),
    }


def valid_tensor_degrees(shape: ModelShape) -> list[int]:
    """Return the degrees that divide all that tensor parallelism splits."""
    counts = split_counts(shape).values()
    return [degree for degree in range(1, shape.heads + 1) if not any(count % degree for count in counts)]
