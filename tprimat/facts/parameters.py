"""How many weights a model has, and how many of them work on one token."""

from dataclasses import dataclass

from tprimat.facts.matmuls import WeightMatrix, attention_matrices, feed_forward_matrices, moe_matrices, output_matrix
from tprimat.facts.shape import ModelShape

BYTES_PER_WEIGHT = {"fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Weights of one model, each counted once."""

    total: int
    active: int
    """Total without the routed experts that a token does not pass; embedding tables count whole, as on model cards."""
    embedding: int
    """Input table."""
    position: int
    """Table of learned positions; 0 with rotary ones."""
    output: int
    """Output layer's own weights; 0 where it shares the input table's."""
    matmul: int
    """Multiplied with each token: all active matrices and the output layer, shared or not; no input table, norm or bias."""
    experts: int
    """Routed experts, all of them; 0 for a dense model."""


def parameters(shape: ModelShape) -> ParameterCount:
    """Counts the weights of a shape.

    Multi-token-prediction layers, which DeepSeek-V3 trains with and drops, are not part of a shape and not counted.
    """
    attention, dense, moe = attention_matrices(shape), feed_forward_matrices(shape), moe_matrices(shape)
    layer_sets = ((attention, shape.layers), (dense, shape.dense_layers), (moe, shape.moe_layers))
    matrices = sum(count * sum(matrix.parameters for matrix in group) for group, count in layer_sets)
    active = sum(count * sum(matrix.active_parameters for matrix in group) for group, count in layer_sets)
    biases = sum(count * _biases(shape, group) for group, count in layer_sets)
    head = output_matrix(shape).parameters
    embedding = shape.vocabulary * shape.hidden
    position = shape.context_tokens * shape.hidden if shape.position == "learned" else 0
    output = 0 if shape.tied_embeddings else head
    rest = biases + _norms(shape) + embedding + position + output
    return ParameterCount(
        total=matrices + rest,
        active=active + rest,
        embedding=embedding,
        position=position,
        output=output,
        matmul=active + head,
        experts=shape.moe_layers * sum(matrix.parameters for matrix in moe if matrix.experts),
    )


def _biases(shape: ModelShape, matrices: list[WeightMatrix]) -> int:
    """Biases of one layer's matrices: all when linear_bias, else those of queries, keys and values when qkv_bias."""
    if shape.linear_bias:
        return sum(matrix.outputs * matrix.copies for matrix in matrices)
    return sum(matrix.outputs for matrix in matrices if matrix.name == "qkv") if shape.qkv_bias else 0


def _norms(shape: ModelShape) -> int:
    """Scales (and, for layernorm, shifts) of two norms a layer, the last one, and those on queries and keys or latents."""
    width = 2 if shape.norm == "layernorm" else 1
    inner = 2 * shape.head_dim if shape.qk_norm else 0
    if shape.kv_lora_rank is not None:
        inner += shape.kv_lora_rank + (shape.q_lora_rank or 0)
    return width * ((2 * shape.layers + 1) * shape.hidden + shape.layers * inner)


def weight_bytes(shape: ModelShape, dtype: str) -> int:
    """Memory of the weights alone, all in one of BYTES_PER_WEIGHT's dtypes."""
    return parameters(shape).total * BYTES_PER_WEIGHT[dtype]
