"""Model shapes: the dimensions of a transformer, the table of known models, and small models of the same structure.

The rows are in tprimat/data/models.yaml.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from tprimat.core.errors import ConfigError
from tprimat.core.rows import DATA, RefuseUnknownKeys, document, read_rows

VOCABULARY_MULTIPLE = 128
"""Megatron-LM's make_vocab_size_divisible_by: the embedding is padded to it, in the same way whatever the layout."""
LARGEST = 2**31
"""Of any dimension: products of several stay within floating point."""
MOST_PARTS = 100_000
"""Of layers and experts, whose divisors are listed."""
ROUTER_SCORES = ("softmax", "sigmoid")
EXPERTS = ("experts", "experts_per_token", "expert_ffn")
LATENT = ("kv_lora_rank", "nope_head_dim", "rope_head_dim", "value_head_dim")
GROUPS = ("router_groups", "router_best_groups")
"""Dimensions that belong together."""
POSITIVE = frozenset(
    ["layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary", "context_tokens", "experts", "expert_ffn"]
)
MEANINGLESS = frozenset({"meta", "base", "instruct", "hf", "model", "pretrain", "sft", "chat", "moe", "it", "dense", "llm"})
"""Words of a model's name that do not change its shape."""
TINY_HEAD_DIM, TINY_FFN_MULTIPLE, TINY_EXPERT_FFN = 4, 64, 16
TINY_VOCABULARY, TINY_CONTEXT_TOKENS = 512, 2048


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(RefuseUnknownKeys):
    """The dimensions of a decoder-only transformer, refused where they are out of range or contradict each other.

    Dense unless `experts` is given; grouped-query attention unless `kv_lora_rank` (multi-head latent attention) is given.
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
    attention_window: int | None = None
    """Keys that a query sees in every second layer, the first among them; None: in all layers all that came before."""
    attention_sinks: bool | None = None
    """Each head has a number that takes part in its softmax, as if of one more key; None: no."""
    not_trained: str | None = None
    """What of it no engine here trains, in words: it is planned, and a run is refused; None: nothing."""
    source: str | None = None

    def __post_init__(self) -> None:
        for broken, what, fix in self._rules():
            if broken:
                raise ConfigError(f"Model {self.name} {what}.", fix=fix)

    def _rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield each rule: whether it is broken, what is wrong, and the way out. Some are Megatron-Core's, in its names."""
        for key in (field.name for field in fields(self)):
            value, least, most = getattr(self, key), int(key in POSITIVE), MOST_PARTS if key in {"layers", "experts"} else LARGEST
            outside = isinstance(value, int | float) and not least <= value <= most
            yield outside, f"has {key}: {value!s:.20}", f"{key}: {least} to {most:,}"
        divide = f"has {self.heads} heads and {self.kv_heads} key/value heads, which must divide them"
        yield self.heads % self.kv_heads != 0, divide, f"kv_heads: {', '.join(map(str, divisors(self.heads)))}"
        score, biased = f"has router_score: {self.router_score!r:.40}", self.router_bias and self.router_score != "sigmoid"
        yield self.router_score not in ROUTER_SCORES, score, f"one of {', '.join(ROUTER_SCORES)}"
        yield biased, "has router_bias, which Megatron-Core supports with sigmoid scores only", "router_score: sigmoid"
        for key in ("shared_experts", "dense_first_layers", "router_bias", "router_groups"):
            ignored = self.experts is None and bool(getattr(self, key))
            yield ignored, f"has {key} but no experts, so it would be ignored", f"add {', '.join(EXPERTS)}, or remove {key}"
        unlatent = self.q_lora_rank is not None and self.kv_lora_rank is None
        yield unlatent, "has q_lora_rank but no kv_lora_rank", "add kv_lora_rank, or remove q_lora_rank"
        for group in (EXPERTS, LATENT, GROUPS):
            missing = [key for key in group if getattr(self, key) is None]
            part = f"describes {', '.join(group)} only in part"
            yield 0 < len(missing) < len(group), part, f"add {', '.join(missing)}, or remove the others"
        dense = f"has {self.layers} layers, of which the first {self.dense_first_layers} are dense"
        yield self.dense_first_layers > self.layers, dense, f"dense_first_layers: 0 to {self.layers}"
        if self.experts and self.experts_per_token is not None:
            chosen = f"has {self.experts} experts and {self.experts_per_token} for each token"
            yield not 1 <= self.experts_per_token <= self.experts, chosen, f"experts_per_token: 1 to {self.experts}"
        if self.experts and self.experts_per_token and self.router_groups is not None and self.router_best_groups is not None:
            groups, best, each = self.router_groups, self.router_best_groups, self.experts_per_token
            there = best * (self.experts // groups) if groups and self.experts % groups == 0 else 0
            fits = 1 <= best <= groups and each % best == 0 and each <= there
            what = f"cannot choose {each} of {self.experts} experts from the best {best} of {groups} groups"
            yield not fits, what, "groups of equal size, whose best ones have as many experts each for a token"

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
    """Return all shapes of the table by name."""
    return MappingProxyType({shape.name.lower(): shape for shape in read_rows("models.yaml", "models", ModelShape)})


def model_shape(name: str) -> ModelShape:
    """Return the shape of a known model, whatever its case; an error names the nearest ones."""
    known = models()
    short = name.lower().replace("_", "-").rpartition("/")[2].removeprefix("meta-")
    table = document(DATA / "models.yaml")
    shape = known.get(name.lower()) or known.get(table["typed"].get(short, short)) or _by_letters().get(_letters(name))
    if shape is None:
        for family, why in table["refused"].items():
            if _letters(name).startswith(_letters(family)):
                raise ConfigError(f"{name} cannot be planned.", why=why, fix="a model of python3 -m tprimat models")
        # Relatives share the words of the family: gpt-oss-120b is none of gpt-3-175b.
        words = re.split(r"[-.]", short)
        near = [one for one in known if re.split(r"[-.]", one)[:2] == words[:2] or _first_word(one) == words[0] != "gpt"]
        near = difflib.get_close_matches(short, near, n=3, cutoff=0.0) or difflib.get_close_matches(short, known, n=3, cutoff=0.8)
        own = "your own under models in config.yaml (python3 -m tprimat models llama-3.2-1b --yaml prints one to start from)"
        fix = f"{', '.join([*near, 'one of python3 -m tprimat models'])}, or {own}"
        raise ConfigError(f"There is no model {name!r}.", why="Its shape is not in the table.", fix=fix)
    return shape


@cache
def _by_letters() -> Mapping[str, ModelShape]:
    typed = document(DATA / "models.yaml")["typed"]
    return {_letters(name): models()[meant] for name, meant in [*typed.items(), *((name, name) for name in models())]}


def _letters(name: str) -> str:
    """Return letters and digits of a model's name: publishers put other marks between them, and words that change no shape."""
    words = re.sub(r"[^a-z0-9.]", " ", name.lower().rpartition("/")[2]).split()
    kept = (word for word in words if word not in MEANINGLESS and not re.fullmatch(r"v0\.\d", word))
    return re.sub(r"[^a-z0-9]", "", "".join(kept))


@cache
def family_of(name: str) -> str | None:
    """Return the first word of the name of a model, such as qwen3 of qwen3_moe; None where no model of the table has it."""
    first = _first_word(name)
    return first if first in {_first_word(known) for known in models()} else None


def _first_word(name: str) -> str:
    return name.lower().replace("_", "-").partition("-")[0]


def tiny(shape: ModelShape) -> ModelShape:
    """Return a model that a CPU trains in seconds, and that can be split over ranks exactly where the real one can."""
    hidden = shape.heads * TINY_HEAD_DIM
    latent: dict[str, Any] = {}
    if shape.kv_lora_rank is not None:
        latent = {"kv_lora_rank": 2 * TINY_HEAD_DIM, "value_head_dim": TINY_HEAD_DIM}
        latent |= dict.fromkeys(("nope_head_dim", "rope_head_dim"), TINY_HEAD_DIM // 2)
        latent |= {} if shape.q_lora_rank is None else {"q_lora_rank": 4 * TINY_HEAD_DIM}
    return replace(
        shape,
        name=f"{shape.name}-tiny",
        hidden=hidden,
        head_dim=TINY_HEAD_DIM,
        ffn=TINY_FFN_MULTIPLE * -(-hidden * 2 // TINY_FFN_MULTIPLE),
        vocabulary=TINY_VOCABULARY,
        context_tokens=TINY_CONTEXT_TOKENS,
        expert_ffn=None if shape.expert_ffn is None else TINY_EXPERT_FFN,
        source=None,
        **latent,
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
