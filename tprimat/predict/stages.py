"""What each pipeline stage holds: layers, weights, and micro-batches in flight."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

from tprimat.core.flops import attention_matrices, feed_forward_matrices, layers_of_last_stage, moe_matrices
from tprimat.core.models import ModelShape
from tprimat.core.rows import DATA, document
from tprimat.core.workload import FullWorkload

ASSUMED: Mapping[str, float] = document(DATA / "prediction.yaml")["routing"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The part of a model on one pipeline rank. A search asks thousands of layouts for the same few, so that sums are kept."""

    index: int
    chunks: tuple[tuple[int, int], ...]
    """Of each model chunk (one without virtual stages): dense layers, layers of experts."""
    embedding: bool
    output: bool
    mtp_layers: int

    @cached_property
    def dense_layers(self) -> int:
        """Layers with a dense feed-forward block."""
        return sum(dense for dense, _ in self.chunks)

    @cached_property
    def moe_layers(self) -> int:
        """Layers of experts, multi-token prediction included."""
        return sum(moe for _, moe in self.chunks)

    @property
    def layers(self) -> int:
        """All layers."""
        return self.dense_layers + self.moe_layers

    @cached_property
    def kind(self) -> tuple[int, int, int, bool]:
        """What its time depends on: stages of one kind take the same."""
        return self.dense_layers, self.moe_layers, self.mtp_layers, self.output


def stages_of(workload: FullWorkload) -> tuple[Stage, ...]:
    """Return the stages of a workload, first to last."""
    shape, layout = workload.shape, workload.layout
    counts = _layers_by_chunk(workload, layout.chunks)
    dense_first = None if shape.experts is None else shape.dense_first_layers
    return _stages(counts, layout.pipeline, dense_first, workload.mtp_layers or 0)


@lru_cache(maxsize=4096)
def _stages(counts: tuple[int, ...], pipeline: int, dense_first: int | None, mtp_layers: int) -> tuple[Stage, ...]:
    """Return the stages whose model chunks have so many layers, of which the first are dense (None: all)."""
    first = 0
    chunks = []
    for count in counts:
        dense = count if dense_first is None else max(0, min(first + count, dense_first) - first)
        chunks.append((dense, count - dense))
        first += count
    return tuple(
        Stage(
            index=index,
            chunks=tuple(chunks[index::pipeline]),
            embedding=index == 0,
            output=index == pipeline - 1,
            mtp_layers=mtp_layers if index == pipeline - 1 else 0,
        )
        for index in range(pipeline)
    )


def _layers_by_chunk(workload: FullWorkload, chunks: int) -> tuple[int, ...]:
    layers, layout = workload.shape.layers, workload.layout
    if workload.chunk_layers:
        return workload.chunk_layers
    if workload.code.balanced_stages and layout.pipeline > 1 and layout.virtual_pipeline is None:
        last = layers_of_last_stage(workload.shape, layout.pipeline)
        return (*[(layers - last) // (chunks - 1)] * (chunks - 1), last)
    return tuple(layers // chunks + (number < layers % chunks) for number in range(chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of one rank."""

    dense: int = 0
    """Everything but routed experts."""
    experts: int = 0
    fp8_matrices: int = 0
    """Those among both that fp8 converts: matrices inside layers, and under some implementations the output layer's."""

    @property
    def total(self) -> int:
        """All weights."""
        return self.dense + self.experts


def weights_of(workload: FullWorkload, stage: Stage) -> Weights:
    """Return the weights that one rank of a stage holds, as Megatron-Core builds them."""
    shape, tensor = workload.shape, workload.layout.tensor
    norm = shape.hidden * _norm_width(shape)
    layers = {moe: count for moe, count in ((False, stage.dense_layers), (True, stage.moe_layers)) if count}
    table = workload.vocabulary // tensor * shape.hidden
    outer = converted = 0
    if stage.embedding:
        outer += table + (shape.context_tokens * shape.hidden if shape.position == "learned" else 0)
    if stage.output:
        outer += norm
        shared_here = shape.tied_embeddings and stage.embedding
        outer += 0 if shared_here else table
        converted = table if workload.code.fp8_output_layer else 0
    if stage.mtp_layers:
        # Two norms and a projection of the joined states in front of each layer, and a norm behind it.
        outer += stage.mtp_layers * (3 * norm + 2 * shape.hidden * shape.hidden // tensor)
        layers[bool(shape.experts)] = layers.get(bool(shape.experts), 0) + stage.mtp_layers
        if not stage.embedding:
            outer += table
    held = [(count, layer_weights(workload, moe=moe)) for moe, count in layers.items()]
    return Weights(
        dense=outer + sum(count * layer.dense for count, layer in held),
        experts=sum(count * layer.experts for count, layer in held),
        fp8_matrices=converted + sum(count * layer.fp8_matrices for count, layer in held),
    )


@lru_cache(maxsize=4096)
def _layer_weights(shape: ModelShape, tensor: int, expert_tensor: int, expert: int, moe: bool) -> Weights:
    matrices = attention_matrices(shape) + (moe_matrices(shape) if moe else feed_forward_matrices(shape))
    dense = experts = matrices_dense = matrices_experts = 0
    for matrix in matrices:
        routed = matrix.copies > 1
        ranks = expert_tensor if routed else tensor
        share = matrix.inputs * matrix.outputs // (1 if matrix.split == "none" else ranks)
        biased = shape.linear_bias or (shape.qkv_bias and matrix.name == "qkv")
        bias = matrix.outputs // (ranks if matrix.split == "outputs" else 1) if biased else 0
        if routed:
            copies = matrix.copies // expert
            experts += copies * (share + bias)
            matrices_experts += copies * share
        else:
            dense += share + bias
            matrices_dense += share if matrix.name != "router" else 0
    width = _norm_width(shape)
    inner = 2 * shape.head_dim if shape.qk_norm and shape.kv_lora_rank is None else 0
    if shape.kv_lora_rank is not None:
        inner += shape.kv_lora_rank + (shape.q_lora_rank or 0)
    dense += width * (2 * shape.hidden + inner) + (shape.heads // tensor if shape.attention_sinks else 0)
    return Weights(dense=dense, experts=experts, fp8_matrices=matrices_dense + matrices_experts)


def layer_weights(workload: FullWorkload, *, moe: bool) -> Weights:
    """Return the weights of one layer on one rank."""
    layout = workload.layout
    return _layer_weights(workload.shape, layout.tensor, workload.expert_tensor_ranks, layout.expert, moe)


def _norm_width(shape: ModelShape) -> int:
    return 2 if shape.norm == "layernorm" else 1


def chunks_in_flight(workload: FullWorkload, stage: Stage) -> tuple[tuple[tuple[int, int], int], ...]:
    """Return the kinds of model chunks of a stage, and how many micro-batches of each it holds at its fullest.

    So do Megatron-Core's 1F1B schedules. The interleaved one runs (stages - stage - 1) x 2 + (chunks - 1) x stages forward passes
    ahead, in rounds of one micro-batch a stage (Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    pipeline, virtual, steps = workload.pipeline_parallel, workload.virtual_pipeline, workload.accumulation
    if virtual is None:
        return ((stage.chunks[0], min(steps, pipeline - stage.index)),)
    return _in_flight(pipeline, stage.chunks, steps, workload.interleaved_group or pipeline, stage.index)


@lru_cache(maxsize=4096)
def _in_flight(
    pipeline: int, chunks: tuple[tuple[int, int], ...], steps: int, group: int, stage: int
) -> tuple[tuple[tuple[int, int], int], ...]:
    virtual = len(chunks)
    total = min(steps * virtual, (pipeline - stage - 1) * 2 + (virtual - 1) * group + 1)
    held: Counter[tuple[int, int]] = Counter()
    for number in range(total):
        held[chunks[number // group % virtual]] += 1
    return tuple(held.items())


def busiest_rank(workload: FullWorkload) -> float:
    """Return by how much natural routing lengthens what experts do: 1 where it is balanced, unknown, or on every rank alike.

    The busiest of n ranks with E / n experts each has the mean load and as many standard deviations more as the largest of n
    normal numbers has (Blom's approximation). A choice at random is uneven by the root of the tokens alone.
    """
    shape, ranks = workload.shape, workload.layout.expert
    if workload.routing != "natural" or ranks == 1 or not shape.experts or not shape.experts_per_token:
        return 1.0
    uneven = math.hypot(ASSUMED["imbalance"], (workload.tokens * ranks) ** -0.5)
    of_expert = uneven * math.sqrt(shape.experts / shape.experts_per_token - 1)
    surplus = of_expert * math.sqrt(ranks / shape.experts) * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return 1 + ASSUMED["felt_share"] * min(surplus, (workload.expert_capacity_factor or ranks) - 1)
