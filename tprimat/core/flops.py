"""Weight matrices, parameters and FLOP of a model: what its shape implies.

FLOP are those of training one token, forward and backward, recomputation excluded, in the three conventions in use.
A matmul of (m, k) with (k, n) takes 2 m n k; its backward pass takes twice that. Attention at sequence length s
multiplies each query with s keys and s weights with values: 2 s (query width + value width) per layer and token.
Sources of the arithmetic: Kaplan et al., arXiv 2001.08361, section 2.1 (6n); Chowdhery et al., PaLM, arXiv 2204.02311,
appendix B (weights plus the whole attention square); Megatron-LM, num_floating_point_operations in
megatron/training/training.py (half the square, since a causal mask never needs the other half).
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from tprimat.core.errors import LayoutError
from tprimat.core.models import ModelShape, padded_vocabulary, valid_tensor_degrees
from tprimat.core.rows import DATA, document

FlopConvention = Literal["causal", "full", "6n"]

CONVENTIONS: tuple[FlopConvention, ...] = get_args(FlopConvention)
FORWARD_AND_BACKWARD = 3


@cache
def seed_shapes() -> dict[str, tuple[int, int, int]]:
    """Return name -> (m, k, n) of the products that every probe of products measures."""
    return {name: (m, k, n) for name, (m, k, n) in document(DATA / "probe_shapes.yaml")["products"].items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMatrix:
    """A linear layer: out = in @ weight, weight of shape (inputs, outputs)."""

    name: str
    inputs: int
    outputs: int
    copies: int = 1
    """Copies in one layer; more than 1 for routed experts only."""
    active_copies: int = 1
    """Copies that one token passes."""
    split: str = "none"
    """What tensor parallelism divides: "outputs" (column parallel), "inputs" (row parallel) or "none" (each rank has all)."""

    @property
    def parameters(self) -> int:
        """The weights of all copies, without biases."""
        return self.inputs * self.outputs * self.copies

    @property
    def active_parameters(self) -> int:
        """The weights that one token is multiplied with."""
        return self.inputs * self.outputs * self.active_copies


def attention_matrices(shape: ModelShape) -> list[WeightMatrix]:
    """Return the projections of one layer's attention; queries, keys and values are one matmul, as in Megatron-LM."""
    if shape.kv_lora_rank is not None:
        return _latent_attention_matrices(shape)
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return [
        WeightMatrix(name="qkv", inputs=shape.hidden, outputs=qkv, split="outputs"),
        WeightMatrix(name="attention_output", inputs=shape.heads * shape.head_dim, outputs=shape.hidden, split="inputs"),
    ]


def _latent_attention_matrices(shape: ModelShape) -> list[WeightMatrix]:
    # DeepSeek-V2 (arXiv 2405.04434), section 2.1: all heads share the rotary part of the keys.
    kv_rank = shape.kv_lora_rank or 0
    nope, rope, heads = shape.nope_head_dim or 0, shape.rope_head_dim or 0, shape.heads
    queries = [WeightMatrix(name="q", inputs=shape.hidden, outputs=heads * (nope + rope), split="outputs")]
    if shape.q_lora_rank is not None:
        queries = [
            WeightMatrix(name="q_down", inputs=shape.hidden, outputs=shape.q_lora_rank),
            WeightMatrix(name="q_up", inputs=shape.q_lora_rank, outputs=heads * (nope + rope), split="outputs"),
        ]
    return [
        *queries,
        WeightMatrix(name="kv_down", inputs=shape.hidden, outputs=kv_rank + rope),
        WeightMatrix(name="kv_up", inputs=kv_rank, outputs=heads * (nope + shape.value_dim), split="outputs"),
        WeightMatrix(name="attention_output", inputs=heads * shape.value_dim, outputs=shape.hidden, split="inputs"),
    ]


def feed_forward_matrices(shape: ModelShape) -> list[WeightMatrix]:
    """Return one dense feed-forward block; gate and up projection are one matmul, as in Megatron-LM."""
    return _block(shape, "mlp", shape.ffn)


def moe_matrices(shape: ModelShape) -> list[WeightMatrix]:
    """Return the router, routed experts and shared experts of one layer; nothing for a dense model."""
    if shape.experts is None or shape.experts_per_token is None or shape.expert_ffn is None:
        return []
    matrices = [WeightMatrix(name="router", inputs=shape.hidden, outputs=shape.experts)]
    matrices += _block(shape, "expert", shape.expert_ffn, copies=shape.experts, active=shape.experts_per_token)
    if shape.shared_experts:
        matrices += _block(shape, "shared_expert", shape.shared_experts * shape.expert_ffn)
    return matrices


def _block(shape: ModelShape, name: str, width: int, *, copies: int = 1, active: int = 1) -> list[WeightMatrix]:
    up = (2 if shape.gated else 1) * width
    return [
        WeightMatrix(name=f"{name}_up", inputs=shape.hidden, outputs=up, split="outputs", copies=copies, active_copies=active),
        WeightMatrix(
            name=f"{name}_down", inputs=width, outputs=shape.hidden, split="inputs", copies=copies, active_copies=active
        ),
    ]


def output_matrix(shape: ModelShape) -> WeightMatrix:
    """Return the layer from the last hidden state to logits; it is a matmul even if it shares the input embedding's weight."""
    return WeightMatrix(name="output", inputs=shape.hidden, outputs=shape.vocabulary, split="outputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Weights of one model, each counted once."""

    total: int
    active: int
    """Total without the routed experts that a token does not pass; embedding tables count in full, as on model cards."""
    embedding: int
    position: int
    output: int
    """The output layer's own weights; 0 where it shares the input table."""
    matmul: int
    """Multiplied with each token: all active matrices and the output layer, shared or not; no input table, norm or bias."""
    experts: int


def parameters(shape: ModelShape) -> ParameterCount:
    """Count the weights of a shape, without multi-token-prediction layers, which are no part of it."""
    attention, dense, moe = attention_matrices(shape), feed_forward_matrices(shape), moe_matrices(shape)
    layer_sets = ((attention, shape.layers), (dense, shape.dense_layers), (moe, shape.moe_layers))
    matrices = sum(count * sum(matrix.parameters for matrix in group) for group, count in layer_sets)
    active = sum(count * sum(matrix.active_parameters for matrix in group) for group, count in layer_sets)
    biased = [(one, count) for group, count in layer_sets for one in group if shape.linear_bias or one.name == "qkv"]
    biases = sum(count * one.outputs * one.copies for one, count in biased if shape.linear_bias or shape.qkv_bias)
    head = output_matrix(shape).parameters
    embedding = shape.vocabulary * shape.hidden
    position = shape.context_tokens * shape.hidden if shape.position == "learned" else 0
    output = 0 if shape.tied_embeddings else head
    sinks = shape.layers * shape.heads if shape.attention_sinks else 0
    rest = biases + sinks + _norms(shape) + embedding + position + output
    return ParameterCount(
        total=matrices + rest,
        active=active + rest,
        embedding=embedding,
        position=position,
        output=output,
        matmul=active + head,
        experts=shape.moe_layers * sum(matrix.parameters for matrix in moe if matrix.copies > 1),
    )


def _norms(shape: ModelShape) -> int:
    """Count scales (and shifts of layernorm) of two norms per layer, the last one, and those on queries and keys or latents."""
    width = 2 if shape.norm == "layernorm" else 1
    inner = 2 * shape.head_dim if shape.qk_norm else 0
    if shape.kv_lora_rank is not None:
        inner += shape.kv_lora_rank + (shape.q_lora_rank or 0)
    return width * ((2 * shape.layers + 1) * shape.hidden + shape.layers * inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmShape:
    """One matmul of the forward pass on one rank: (m, k) @ (k, n)."""

    name: str
    m: int
    """Tokens."""
    n: int
    k: int
    repeats: int = 1
    """Runs per layer: one for each expert of the layer."""


def flop_per_token(shape: ModelShape, sequence_tokens: int, convention: FlopConvention = "causal", dropped: float = 0.0) -> float:
    """Return the FLOP of one token of a sequence, forward and backward, over all layers, without recomputation.

    The convention `causal` is 6 x weights multiplied with a token + half the attention square, `full` with the whole square, and
    `6n` 6 x all active weights, input table included, without attention. A token's own experts count, but for the share `dropped`
    (0..1) of choices that found their expert full, and so were never computed.
    """
    count = parameters(shape)
    chosen = shape.moe_layers * sum(matrix.active_parameters for matrix in moe_matrices(shape) if matrix.copies > 1)
    spared = dropped * chosen
    if convention == "6n":
        return 6.0 * (count.active - spared)
    # Scores and weighted values: 2 FLOP for each token of the sequence and column of heads, in the forward pass.
    columns = shape.heads * (shape.head_dim + shape.value_dim)
    square = FORWARD_AND_BACKWARD * 4.0 * mean_keys(shape, sequence_tokens) * columns * shape.layers
    return 6.0 * (count.matmul - spared) + (square / 2 if convention == "causal" else square)


def mean_keys(shape: ModelShape, sequence_tokens: int) -> float:
    """Return the keys that a token sees under a causal mask: the mean over tokens, and over layers with and without a window."""
    window = shape.attention_window
    if window is None or window >= sequence_tokens:
        return sequence_tokens / 2
    windowed = -(-shape.layers // 2) / shape.layers
    return windowed * (window - window**2 / (2 * sequence_tokens)) + (1 - windowed) * sequence_tokens / 2


def gemm_shapes(shape: ModelShape, micro_batch: int, sequence: int, tensor_parallel: int = 1) -> list[GemmShape]:
    """Return the forward matmuls of one layer, then of the output layer, as one tensor-parallel rank runs them.

    With experts, the layer is one of experts, and each expert gets an even share of the tokens (rounded up). Backward runs each
    matmul twice more, with (m, n, k) permuted. A degree that divides no matrix is refused.
    """
    if tensor_parallel not in (degrees := valid_tensor_degrees(shape)):
        what = f"{shape.name} cannot be split over {tensor_parallel} tensor-parallel ranks."
        why = f"Each needs whole heads, of {shape.heads} and {shape.kv_heads}, and equal shares of width and vocabulary."
        raise LayoutError(what, why=why, fix=", ".join(map(str, degrees)))
    layer = attention_matrices(shape) + (moe_matrices(shape) or feed_forward_matrices(shape))
    tokens = micro_batch * sequence
    return [
        GemmShape(
            name=matrix.name,
            m=-(-tokens * matrix.active_copies // matrix.copies),
            n=matrix.outputs // (tensor_parallel if matrix.split == "outputs" else 1),
            k=matrix.inputs // (tensor_parallel if matrix.split == "inputs" else 1),
            repeats=matrix.copies,
        )
        for matrix in [*layer, output_matrix(shape)]
    ]


def layers_of_last_stage(shape: ModelShape, stages: int) -> int:
    """Return how many layers the last of several pipeline stages gets, so that the slowest stage has the least to multiply.

    The output layer is as much work as some layers, by its matrix; the other stages share the rest evenly.
    """
    block = moe_matrices(shape) or feed_forward_matrices(shape)
    layer = sum(matrix.active_parameters for matrix in [*attention_matrices(shape), *block])
    output, others, even = padded_vocabulary(shape) * shape.hidden / layer, stages - 1, shape.layers // stages
    choices = [last for last in range(even, 0, -1) if (shape.layers - last) % others == 0]
    return min(choices, key=lambda last: max(last + output, (shape.layers - last) / others), default=even)
