"""Memory by two other estimators, for comparison on the same rows. The formulas are theirs, reimplemented here.

Megatron-LM: megatron/training/theoretical_memory_usage.py of NVIDIA/Megatron-LM, commit d98e8a64dd (Apache-2.0). It describes the
first pipeline stage, without the allocator, NCCL, recomputation and unfused attention.

calculon: calculon/llm/llm.py of calculon-ai/calculon, commit caa4b11 (Apache-2.0; Isaev et al., SC 2023). Its models are GPT-3's
kind: as many key/value heads as heads, a plain feed-forward block, and neither embedding nor logits.
"""

import math

from tprimat.core.flops import attention_matrices, feed_forward_matrices, moe_matrices
from tprimat.core.workload import FullWorkload

MEGATRON_ACTIVATION_TERMS = 18
"""Times tokens and hidden: of a layer, besides four times the feed-forward width."""


def megatron_estimate(workload: FullWorkload) -> int:
    """Return what Megatron-LM's own estimator says for the first pipeline stage."""
    shape, layout = workload.shape, workload.layout
    tensor, pipeline = layout.tensor, layout.pipeline
    norm = shape.hidden * (1 if shape.norm == "rmsnorm" else 2)
    attention = sum(matrix.parameters for matrix in attention_matrices(shape))
    table = workload.vocabulary * shape.hidden
    split = shape.layers * attention + shape.dense_layers * sum(matrix.parameters for matrix in feed_forward_matrices(shape))
    whole, experts = shape.layers * 2 * norm + norm, 0
    for matrix in moe_matrices(shape):
        count = shape.moe_layers * matrix.parameters
        if matrix.copies > 1:
            experts += count
        elif matrix.name == "router":
            whole += count
        else:
            split += count
    tables = 2 if pipeline == 1 and not shape.tied_embeddings else 1
    dense = (split / pipeline + tables * table) / tensor + whole / pipeline
    routed = experts / (pipeline * workload.expert_tensor_ranks * layout.expert)

    def of_each(replicas: int) -> float:
        return 6 + 12 / replicas if workload.distributed_optimizer else 18

    states = dense * of_each(workload.replicas) + routed * of_each(workload.expert_replicas)
    return round(states + _megatron_activations(workload))


def _megatron_activations(workload: FullWorkload) -> float:
    shape, layout = workload.shape, workload.layout
    tokens, pipeline = workload.sequence_tokens * workload.micro_batch, layout.pipeline
    if layout.sequence_parallel or layout.tensor == 1:
        total = tokens * shape.hidden * (MEGATRON_ACTIVATION_TERMS + 4 * shape.ffn / shape.hidden) * shape.layers
        divided = layout.tensor
    else:
        total = tokens * shape.hidden * (10 + 24 / layout.tensor) * shape.layers
        divided = 1
    total += 8 * tokens * pipeline + tokens * shape.hidden * pipeline
    if layout.virtual_pipeline:
        total *= 1 + (pipeline - 1) / (pipeline * layout.virtual_pipeline)
    elif pipeline > 1:
        total *= min(1, workload.accumulation / pipeline)
    if pipeline == 1:
        total += tokens * shape.hidden * 4 * (1 + workload.vocabulary / shape.hidden)
    return total / divided


def calculon_estimate(workload: FullWorkload) -> int | None:
    """Return what calculon's memory model says; None for experts and latent attention, which it does not have."""
    shape, layout = workload.shape, workload.layout
    if shape.experts or shape.kv_lora_rank:
        return None
    blocks = math.ceil(shape.layers / layout.pipeline)
    width, tensor = shape.heads * shape.head_dim, layout.tensor
    weights = (4 * shape.hidden * width + 2 * shape.hidden * shape.ffn + 5 * width + shape.ffn) / tensor + 4 * shape.hidden
    shards = layout.data if workload.distributed_optimizer else 1
    states = weights * (2 * blocks + 4 + 2 / shards * (blocks - 1) + 12 / shards * blocks)
    tokens = workload.micro_batch * workload.sequence_tokens
    scores = 5 * shape.heads * workload.sequence_tokens / shape.hidden
    if workload.recompute == "selective" or workload.code.attention == "flash":
        scores = 0.0
    inside = 24 + scores
    block = tokens * shape.hidden * ((10 + inside) / tensor if layout.sequence_parallel else 10 + inside / tensor)
    held = min(workload.accumulation, layout.pipeline)
    if layout.virtual_pipeline:
        held = round(held * (1 + (layout.pipeline - 1) / (layout.virtual_pipeline * layout.pipeline)))
    if workload.recompute == "full":
        return round(states + block + blocks * held * 2 * tokens * shape.hidden)
    return round(states + block * blocks * held)
