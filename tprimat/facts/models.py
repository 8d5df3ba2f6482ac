"""Architectures: what a model's configuration file says of its shape."""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's rescaling of rotary frequencies for long contexts."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a decoder-only transformer."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
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
    """Biases on every linear layer, as in GPT-3."""
    tied_embeddings: bool = False
    position: str = "rope"
    """rope or learned."""
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
