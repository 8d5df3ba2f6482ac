"""Predict the seconds of a training step, by part.

A step is composed of pieces at their exact shapes: each product forward, for the gradient that flows on (dgrad) and for the
weight's (wgrad); attention; what only passes over memory; exchanges between ranks as far as nothing hides them; the bubble of the
pipeline's schedule; the optimizer. The device is as fast as `Rates` say, and the host launches no faster than they say.

Nothing here is fitted to a training run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tprimat.core.flops import WeightMatrix, attention_matrices, feed_forward_matrices, mean_keys, moe_matrices
from tprimat.core.rows import DATA, document
from tprimat.core.workload import FullWorkload
from tprimat.predict.memory import expert_rows
from tprimat.predict.rates import Rates
from tprimat.predict.stages import Stage, Weights, busiest_rank, stages_of, weights_of

TimePart = Literal[
    "products", "attention", "memory", "tensor", "context", "experts", "pipeline", "bubble", "replicas", "optimizer", "host"
]
TIME_PARTS: tuple[TimePart, ...] = get_args(TimePart)
FIGURES = document(DATA / "prediction.yaml")
ASSUMED: Mapping[str, float] = FIGURES["time"]
ADAM_BYTES: Mapping[str, Mapping[str, int]] = FIGURES["adam_bytes"]
"""Dtype of states and implementation -> bytes that the update of a weight moves."""
LOSS_BYTES: Mapping[str, tuple[int, int]] = FIGURES["loss_bytes"]
"""Kind of loss -> elements of a logit's dtype, and further bytes."""
EAGER_ELEMENTS: Mapping[str, tuple[int, int]] = FIGURES["eager_elements"]
"""What operations pass over -> how often they do, forward and backward."""
LAUNCHES: Mapping[int, Mapping[str, float]] = {row["tensor_parallel"]: row for row in FIGURES["launches"]}
"""Tensor ranks, at least -> what the host takes to launch a layer kernel by kernel: seconds, and those of the slowest host."""
FP32_SUM_BYTES = 8
"""A weight, of reading and writing the sum of its gradients in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePrediction:
    """One step."""

    parts: Mapping[TimePart, float]
    """Seconds; together the step."""
    tokens: int
    """Of all ranks."""
    gpus: int
    slow_host_seconds: float
    """The step with the slowest host that was measured."""

    @property
    def step_seconds(self) -> float:
        """The whole step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput."""
        return self.tokens / self.step_seconds / self.gpus


Piece = dict[TimePart, float]
"""Seconds of one micro-batch on one stage, by part."""


def predict_time(workload: FullWorkload, rates: Rates, known: dict[Any, Any] | None = None) -> TimePrediction:
    """Return the time of a step on a machine; `known` keeps what other layouts of one search have, too."""
    known = {} if known is None else known
    stages = stages_of(workload)
    layout, steps = workload.layout, workload.accumulation
    of_kind = {stage.kind: stage for stage in stages}
    pieces = {kind: _stage_piece(workload, rates, stage, known) for kind, stage in of_kind.items()}
    # A micro-batch takes at least what the host needs to launch it.
    own, late = (
        {kind: max(sum(pieces[kind].values()), _launches(workload, rates, stage, host)) for kind, stage in of_kind.items()}
        for host in ("seconds", "slowest")
    )
    totals = [own[stage.kind] for stage in stages]
    slowest = totals.index(max(totals))
    piece, virtual = pieces[stages[slowest].kind], layout.virtual_pipeline or 1
    once = (slowest, layout.pipeline, layout.virtual_pipeline, layout.data, *_split(workload))
    if (update := known.get(once)) is None:
        weights = weights_of(workload, stages[slowest])
        update = known[once] = _exchanged(workload, rates, weights), _optimizer(workload, rates, weights)
    exchanged, optimizer = update
    parts: dict[TimePart, float] = {
        **{part: steps * value for part, value in piece.items()},
        "host": steps * (totals[slowest] - sum(piece.values()) + piece.get("host", 0.0)),
        "bubble": (sum(totals) - totals[slowest]) / virtual,
        "pipeline": _pipeline_exchange(workload, rates, virtual),
        "replicas": _replica_exchange(workload, exchanged, totals[slowest]),
        "optimizer": optimizer,
    }
    later = [late[stage.kind] for stage in stages]
    longer = (steps - 1 / virtual) * (max(later) - totals[slowest]) + (sum(later) - sum(totals)) / virtual
    return TimePrediction(
        parts={part: parts.get(part, 0.0) for part in TIME_PARTS},
        tokens=workload.tokens_per_step,
        gpus=layout.world_size,
        slow_host_seconds=sum(parts.values()) + longer,
    )


def _launches(workload: FullWorkload, rates: Rates, stage: Stage, host: str) -> float:
    """Return what the host takes to launch a stage's micro-batch; `host` is a column of LAUNCHES."""
    kernels = (stage.layers + 1) * ASSUMED["kernels_of_a_layer"] + stage.moe_layers * ASSUMED["kernels_of_a_router"]
    seconds = kernels * max(rates.launch_seconds, workload.code.call_seconds) + stage.moe_layers * _expert_calls(workload)
    measured = [row[host] for ranks, row in LAUNCHES.items() if ranks <= workload.layout.tensor]
    if not measured or not workload.code.launches_own_layers:
        return seconds
    again = ASSUMED["launched_again"] * _recomputed(workload, stage.dense_layers) if workload.recompute == "full" else 0.0
    return max(seconds, (stage.dense_layers + again) * measured[-1])


def _split(workload: FullWorkload) -> tuple[object, ...]:
    """Return what a layer's time depends on besides its micro-batch and recomputation."""
    layout = workload.layout
    return layout.tensor, layout.context, layout.expert, workload.code.shards_weights


def _stage_piece(workload: FullWorkload, rates: Rates, stage: Stage, known: dict[Any, Any]) -> Piece:
    again = _recomputed(workload, stage.dense_layers + stage.moe_layers)
    split = workload.micro_batch, *_split(workload)
    whole = "stage", workload.recompute, again, stage.kind, *split
    total: Piece = known.setdefault(whole, {})
    if total:
        return total
    again_dense = min(again, stage.dense_layers)  # dense layers come first
    layers = {
        (False, True): again_dense,
        (False, False): stage.dense_layers - again_dense,
        (True, True): again - again_dense,
        (True, False): stage.moe_layers - (again - again_dense),
    }
    if stage.mtp_layers:
        layers[workload.shape.experts is not None, workload.recompute_layers is None] += stage.mtp_layers
    pieces = []
    for (moe, anew), count in layers.items():
        key = moe, workload.recompute if anew else "none", *split
        if count and key not in known:
            known[key] = _layer(workload if anew else workload.changed(recompute="none"), rates, moe=moe)
        pieces += [(known[key], count)] if count else []
    if stage.output:
        pieces.append((_output(workload, rates), 1 + stage.mtp_layers))
    for piece, count in pieces:
        total |= {part: total.get(part, 0.0) + count * seconds for part, seconds in piece.items()}
    return total


def _recomputed(workload: FullWorkload, layers: int) -> int:
    """Return to how many layers of a stage its recomputation applies: under `block` to the first of each chunk."""
    if workload.recompute != "full" or workload.recompute_layers is None:
        return layers
    return min(layers, workload.recompute_layers * (workload.virtual_pipeline or 1))


MODULES_OF_MATRICES: Mapping[str, list[str]] = FIGURES["modules_of_matrices"]
"""Matrix -> the modules with which its product is computed again."""


def _layer(workload: FullWorkload, rates: Rates, *, moe: bool) -> Piece:
    shape = workload.shape
    matrices = attention_matrices(shape) + (moe_matrices(shape) if moe else feed_forward_matrices(shape))
    recompute = workload.recompute == "full"
    products = 0.0
    uneven = busiest_rank(workload) if moe else 1.0
    selected = workload.recompute == "selective" and workload.code.selects_operations and not workload.recompute_modules
    for matrix in matrices:
        again = (
            ASSUMED["selected_again_share"] if selected else float(workload.repeats(*MODULES_OF_MATRICES.get(matrix.name, ())))
        )
        products += _products(workload, rates, matrix, again=again) * (uneven if matrix.copies > 1 else 1.0)
    forward, backward = _attention(workload, rates)
    moved = _memory_bytes(workload, matrices, moe=moe, again=recompute)
    return {
        "products": products,
        "attention": forward * (1 + (not selected and workload.repeats("core_attn"))) + backward,
        "memory": moved / (rates.region_bandwidth or rates.bandwidth),
        "tensor": _tensor_exchange(workload, rates, again=recompute),
        "context": _context_exchange(workload, rates, forward),
        "experts": uneven * _expert_exchange(workload, rates, again=workload.repeats("moe")) if moe else 0.0,
        "host": _expert_calls(workload) if moe else 0.0,
    }


def _graphed(workload: FullWorkload) -> bool:
    """Whether one CUDA graph holds a step of a mixture."""
    return workload.code.graphs_balanced_steps and workload.routing == "balanced" and workload.fp8_scaling == "mxfp8"


def _expert_calls(workload: FullWorkload) -> float:
    """Return what the host takes for a layer's experts on one rank: calls for each product, and to convert what it multiplies."""
    calls = 2 * (3 + workload.repeats("moe") + 2 * workload.narrow)
    each = 0.0 if _graphed(workload) else workload.code.expert_call_seconds
    return (workload.shape.experts or 0) // workload.layout.expert * calls * each


def _products(workload: FullWorkload, rates: Rates, matrix: WeightMatrix, *, again: float) -> float:
    """Return the seconds of a matrix's three products, of the first as often again.

    Grouped ones that no probe measured are as fast as single ones.
    """
    routed = matrix.copies > 1
    in_bf16 = routed and workload.code.expert_wgrad_in_bf16
    dtype = _in_bf16(workload) if matrix.name == "router" else workload.matmul_dtype
    wgrad_dtype = _in_bf16(workload) if in_bf16 else dtype
    ranks = workload.expert_tensor_ranks if routed else workload.layout.tensor
    outputs = matrix.outputs // (ranks if matrix.split == "outputs" else 1)
    inputs = matrix.inputs // (ranks if matrix.split == "inputs" else 1)
    copies = matrix.copies // workload.layout.expert if routed else 1
    rows = max(1, expert_rows(workload) // copies) if routed else workload.tokens
    if matrix.split == "none":
        rows = max(1, rows // workload.sequence_ranks)
    kind = "grouped_" if copies > 1 else ""
    forward = rates.product_seconds(rows, outputs, inputs, dtype, f"{kind}fprop")
    dgrad = rates.product_seconds(rows, inputs, outputs, dtype, f"{kind}dgrad")
    wgrad, accumulate = _weight_gradient(workload, rates, (outputs, inputs, rows), wgrad_dtype, f"{kind}wgrad")
    return copies * (forward * (1 + again) + dgrad + wgrad + accumulate)


def _weight_gradient(
    workload: FullWorkload, rates: Rates, sides: tuple[int, int, int], dtype: str, kind: str
) -> tuple[float, float]:
    """Return the seconds of a weight gradient's product, and of adding it to the sum.

    Where the product was measured with an fp32 sum, that is part of it; a sum in bf16 then takes so much less.
    """
    if rates.adds_gradients(dtype, kind) and workload.code.accumulates_weight_gradients:
        narrower = sides[0] * sides[1] * (_accumulation_bytes(workload) - FP32_SUM_BYTES)
        return rates.product_seconds(*sides, dtype, kind), narrower / rates.bandwidth
    plain = "fprop" if rates.adds_gradients(dtype, kind) else kind
    added = sides[0] * sides[1] * _accumulation_bytes(workload) / rates.bandwidth
    return rates.product_seconds(*sides, dtype, plain), added


def _accumulation_bytes(workload: FullWorkload) -> int:
    """Return the bytes per weight that adding its gradient to the sum moves besides the product itself."""
    total = 2 * workload.gradient_bytes
    return total if workload.code.accumulates_weight_gradients else 2 + 2 + total


def _in_bf16(workload: FullWorkload) -> str:
    """Return the dtype of products that stay in bf16 under fp8."""
    return "bf16" if workload.narrow else workload.matmul_dtype


def _output(workload: FullWorkload, rates: Rates) -> Piece:
    """Return output layer and loss, which stay in the wider type under fp8 unless the implementation says otherwise."""
    shape = workload.shape
    dtype = workload.matmul_dtype if workload.code.fp8_output_layer else _in_bf16(workload)
    words, tokens = workload.vocabulary // workload.layout.tensor, workload.tokens
    rows = min(tokens, workload.code.loss_chunk_tokens) if workload.loss == "chunked" else tokens
    sides = (words, shape.hidden, rows)
    seconds = rates.product_seconds(rows, words, shape.hidden, dtype) + rates.product_seconds(
        rows, shape.hidden, words, dtype, "dgrad"
    )
    measured_with_sum = rates.adds_gradients(dtype, "wgrad") and workload.loss == "chunked"
    sums = words * shape.hidden * (2 * workload.gradient_bytes - (FP32_SUM_BYTES if measured_with_sum else 0))
    seconds += rates.product_seconds(*sides, dtype, *(["wgrad"] if measured_with_sum else [])) + sums / rates.bandwidth
    seconds *= tokens / rows
    moved: float = tokens * words * _loss_bytes(workload)
    if shape.tied_embeddings and workload.loss == "chunked" and workload.layout.pipeline == 1:
        moved += words * shape.hidden * ASSUMED["tied_bytes"]
    return {"products": seconds, "memory": moved / rates.bandwidth}


def _loss_bytes(workload: FullWorkload) -> int:
    """Return the bytes a logit that the loss moves, both passes, between the products of the output layer."""
    kind = "chunked_eager" if workload.loss == "chunked" and workload.code.eager_loss else workload.loss
    elements, others = LOSS_BYTES[kind]
    return elements * workload.element_bytes + others


def _attention(workload: FullWorkload, rates: Rates) -> tuple[float, float]:
    """Return the seconds of attention's own products, forward and backward, by causal FLOP."""
    shape, layout = workload.shape, workload.layout
    heads = shape.heads // layout.tensor
    flop = 2 * workload.tokens * mean_keys(shape, workload.sequence_tokens) * heads * (shape.head_dim + shape.value_dim)
    heads *= max(1, workload.micro_batch)
    place = (workload.sequence_tokens, heads, shape.head_dim)
    # The backward pass multiplies five times where the forward pass multiplies twice.
    forward, backward = (rates.attention_seconds(much * flop, *place, backward=much > 1) for much in (1, 2.5))
    if rates.attention:
        return forward, backward
    speed = rates.torch_attention if workload.code.attends_by_torch else 1.0
    speed *= ASSUMED["narrow_heads_speed"] if shape.head_dim <= ASSUMED["narrow_head"] else 1.0
    speed *= ASSUMED["sinks_speed"] if shape.attention_sinks else 1.0
    return forward / speed, backward / speed


def _memory_bytes(workload: FullWorkload, matrices: Sequence[WeightMatrix], *, moe: bool, again: bool) -> float:
    """Return the bytes that norms, rotation, activation, and conversions to 8 bits read and write in one layer."""
    shape, code = workload.shape, workload.code
    rows, width = workload.tokens, shape.ffn / workload.layout.tensor
    if moe:
        rows, width = expert_rows(workload), (shape.expert_ffn or 0) / workload.expert_tensor_ranks
    halves = 2 if shape.gated else 1
    # torch's SwiGLU: silu (2, backward 3), the sum with an offset of 0 (2), a product (3, backward 6), and a concatenation (4).
    activation = (7, 13) if shape.gated and not code.fused_activation else (halves + 1, 2 * halves + 1)
    forward, backward = _eager_elements(workload) if code.eager_layers else _compiled_elements(workload)
    forward += rows * width * activation[0]
    backward += rows * width * activation[1]
    if moe and shape.linear_bias:  # added, and its gradient summed, beside the grouped products
        forward += 2 * rows * (halves * width + shape.hidden)
        backward += rows * (halves * width + shape.hidden)
        if shape.gated and not _graphed(workload):
            # Both halves are limited and joined, and the second bias is weighted, by functions of their own (moe/experts.py and
            # fused_bias_geglu.py of Megatron-Core).
            forward += rows * (8 * width + 4 * shape.hidden)
            backward += rows * (10 * width + 4 * shape.hidden)
    if moe:
        forward += 6 * rows * shape.hidden  # tokens are sorted by expert, and back
        backward += 6 * rows * shape.hidden
    total = workload.element_bytes * (forward * (2 if again else 1) + backward)
    if workload.narrow:
        total += _conversion_bytes(workload, matrices, again=again)
    return total


def _compiled_elements(workload: FullWorkload) -> tuple[float, float]:
    """Return the elements that two norms with their residual sums, and the rotation, read and write in each pass."""
    shape = workload.shape
    hidden = workload.tokens / workload.sequence_ranks * shape.hidden
    joint = workload.tokens * (shape.heads + 2 * shape.kv_heads) * shape.head_dim / workload.layout.tensor
    return 8 * hidden + 2 * joint, 12 * hidden + 2 * joint


def _eager_elements(workload: FullWorkload) -> tuple[float, float]:
    """Return the same where each operation reads its operands and writes its result."""
    shape = workload.shape
    hidden = workload.tokens / workload.sequence_ranks * shape.hidden
    queries, keys = (workload.tokens * heads * shape.head_dim / workload.layout.tensor for heads in (shape.heads, shape.kv_heads))
    joint = queries + 2 * keys
    amounts = {
        "hidden": hidden,
        "rotated": queries + keys if shape.position == "rope" else 0,
        "normed": queries + keys if shape.qk_norm else 0,
        "copied": queries if shape.heads > shape.kv_heads else 0,
        "joint": joint,
        "biased": joint if shape.qkv_bias else 0,
    }
    forward, backward = (sum(times[way] * amounts[name] for name, times in EAGER_ELEMENTS.items()) for way in (0, 1))
    return forward, backward


def _conversion_bytes(workload: FullWorkload, matrices: Sequence[WeightMatrix], *, again: bool) -> float:
    """Return the bytes of finding the largest value, then writing 8 or 4 bits in both orientations, of rows and gradients.

    Without wgrad in fp8 one orientation is enough, and a row, which has its own scale, is read once; so is a number whose block
    has its own scale. NVFP4 finds the largest value of the tensor besides.
    """
    reads = 2 if workload.fp8_scaling in {"blockwise", "mxfp8", "mxfp4"} else 2 + 2
    total = 0.0
    for matrix in matrices:
        routed = matrix.copies > 1
        rows = expert_rows(workload) if routed else workload.tokens
        ranks = workload.expert_tensor_ranks if routed else workload.layout.tensor
        outputs = matrix.outputs / (ranks if matrix.split == "outputs" else 1)
        inputs = matrix.inputs / (ranks if matrix.split == "inputs" else 1)
        moved = 2 + 1 if routed and workload.code.expert_wgrad_in_bf16 else reads + 2 * workload.narrow_bytes
        # Before DTensors are gathered, each rank converts its own tokens; what is left is the other orientation.
        gathered = workload.code.exchanges_dtensors and ranks > 1 and matrix.split == "outputs"
        read = (moved - workload.narrow_bytes) / ranks + 2 * workload.narrow_bytes if gathered else moved
        if matrix.name != "router":
            total += rows * (read * inputs * (2 if again else 1) + moved * outputs)
    return total


def _tensor_exchange(workload: FullWorkload, rates: Rates, *, again: bool) -> float:
    """Return by how much exchanges between tensor ranks lengthen one layer.

    Under sequence parallelism a layer gathers twice and scatters twice in each pass. In the backward pass Megatron-Core scatters
    while wgrad runs and, where a layer has not kept its gathered inputs, gathers them while dgrad runs. Without sequence
    parallelism, the forward pass sums twice, and the backward pass twice while wgrad runs. Both wait for the same memory, so that
    products beside an exchange take longer (overlapped_shares in data/prediction.yaml).
    """
    layout, code, size = workload.layout, workload.code, workload.element_bytes
    if layout.tensor == 1:
        return 0.0
    message = workload.tokens * workload.shape.hidden * size
    passes, share = 2 if again else 1, rates.overlapped_share(message)
    if not layout.sequence_parallel:
        return 2 * rates.exchange_seconds("all_reduce", message, layout.tensor) * (passes + share)
    gather = rates.exchange_seconds("all_gather", message, layout.tensor)
    scatter = rates.exchange_seconds("reduce_scatter", message, layout.tensor)
    if code.exchanges_dtensors:
        copied = 2 * message / rates.bandwidth  # the tokens' dimension is not the first
        gathers = passes + (code.selects_operations and workload.recompute == "selective")
        forward = gathers * (gather + copied) * (workload.narrow_bytes / size if workload.narrow else 1.0)
        waited = 2 * (forward + gather + copied + (scatter + copied) * (passes + 1))
        return waited * (ASSUMED["asynchronous_share"] if code.overlaps_tensor_parallel else 1.0)
    if code.overlaps_tensor_parallel and (code.overlaps_in_fp8 or not workload.narrow):
        return share * 2 * (gather + scatter) * (passes + 1)
    beside = scatter if code.keeps_gathered_inputs else gather + scatter
    return 2 * (gather + scatter) * passes + 2 * gather + share * 2 * beside


def _context_exchange(workload: FullWorkload, rates: Rates, attention: float) -> float:
    """Return the exchange of keys and values between context ranks that is not hidden, of one layer."""
    shape, layout = workload.shape, workload.layout
    if layout.context == 1:
        return 0.0
    heads = shape.heads if shape.kv_lora_rank is not None else shape.kv_heads
    message = (
        workload.tokens * layout.context * heads * (shape.head_dim + shape.value_dim) / layout.tensor * workload.element_bytes
    )
    gather = rates.exchange_seconds("all_gather", message, layout.context, layout.tensor)
    scatter = rates.exchange_seconds("reduce_scatter", message, layout.context, layout.tensor)
    if workload.code.gathers_keys_values:
        return gather + gather + scatter
    # Around a ring, all but what takes longer than the attention in the meantime is hidden.
    return max(0.0, gather - attention) + max(0.0, gather + scatter - 2.5 * attention)


def _expert_exchange(workload: FullWorkload, rates: Rates, *, again: bool) -> float:
    """Return the exchange of tokens between expert ranks, of one layer: there and back, in both passes.

    Megatron-Core's groups of expert ranks are neighbors, whatever the tensor and context degrees, up to the expert tensor ranks.
    """
    layout = workload.layout
    if layout.expert == 1:
        return 0.0
    message = expert_rows(workload) / workload.expert_tensor_ranks * workload.shape.hidden * workload.element_bytes
    stride = workload.expert_tensor_ranks
    share = _share_of_nodes(workload, layout.expert / rates.linked(stride))
    one = rates.exchange_seconds("all_to_all", message, layout.expert, stride, share)
    hidden = workload.code.overlaps_experts or _graphed(workload)
    return one * (6 if again else 4) * (ASSUMED["exposed_share"] if hidden else 1.0)


def _share_of_nodes(workload: FullWorkload, nodes: float) -> float:
    """Return the nodes that a token travels to over the experts it chooses: 1 where it travels once for each expert.

    A choice at random hits n (1 - (1 - 1 / n)^k) of n nodes with k experts. Where a token uses some groups of experts only, the
    nodes are those of as many groups.
    """
    shape = workload.shape
    if not workload.code.dispatches_once_a_node or nodes <= 1 or not shape.experts_per_token:
        return 1.0
    reached = nodes
    if shape.router_groups and shape.router_best_groups:
        reached = min(nodes, shape.router_best_groups * max(1.0, nodes / shape.router_groups))
    return reached * (1 - (1 - 1 / reached) ** shape.experts_per_token) / shape.experts_per_token


def _pipeline_exchange(workload: FullWorkload, rates: Rates, virtual: int) -> float:
    """Return the messages between stages that nothing hides: those that fill and drain the pipeline."""
    layout = workload.layout
    if layout.pipeline == 1:
        return 0.0
    message = workload.tokens / workload.sequence_ranks * workload.shape.hidden * workload.element_bytes
    stride = layout.world_size // layout.pipeline
    one = rates.exchange_seconds("send_recv", message, 2, stride)
    return one * 2 * ((layout.pipeline - 1) + workload.accumulation * virtual)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Seconds of the exchanges between replicas, each alone, and by how much it lengthens the products beside it."""

    alone: Mapping[str, float]
    beside: Mapping[str, float]
    copies: float
    """Into and out of each message, and conversions between its dtype and the weights', where replicas share weights."""


def _exchanged(workload: FullWorkload, rates: Rates, weights: Weights) -> Exchanged:
    """Return the exchange of all gradients and weights of a rank between replicas."""
    layout, shards = workload.layout, workload.code.shards_weights
    message = 2.0 * weights.total / max(1, workload.shape.layers // layout.pipeline) if shards else ASSUMED["bucket_bytes"]
    exchanges = [(_reduction(workload), float(workload.gradient_bytes))]
    exchanges += [("all_gather", 2.0)] if workload.distributed_optimizer else []
    alone = dict.fromkeys(("reduce_scatter", "all_reduce", "all_gather"), 0.0)
    beside = dict(alone)
    for count, ranks, stride in (
        (weights.dense, workload.replicas, layout.tensor),
        (weights.experts, workload.expert_replicas, workload.expert_tensor_ranks * layout.expert),
    ):
        for kind, size in exchanges:
            alone[kind] += rates.exchange_seconds(kind, size * count, ranks, stride)
            beside[kind] += rates.slowdown_seconds(kind, size * count, ranks, stride, message)
    return Exchanged(alone, beside, weights.total * (14 + 20 / workload.replicas) / rates.bandwidth)


def _reduction(workload: FullWorkload) -> str:
    return "reduce_scatter" if workload.distributed_optimizer else "all_reduce"


def _replica_exchange(workload: FullWorkload, exchanged: Exchanged, micro_batch: float) -> float:
    """Return the exchange of gradients and weights between replicas that neither pass of a micro-batch hides."""
    alone, beside, reduction = exchanged.alone, exchanged.beside, _reduction(workload)
    if workload.code.shards_weights:
        # Weights are gathered for every pass, and gradients scattered after every micro-batch.
        each, slower = (2 * of["all_gather"] + of[reduction] for of in (alone, beside))
        return workload.accumulation * (exchanged.copies + max(slower, each - micro_batch))
    backward = max(beside[reduction], alone[reduction] - micro_batch * 2 / 3)
    return backward + max(beside["all_gather"], alone["all_gather"] - micro_batch / 3)


def _optimizer(workload: FullWorkload, rates: Rates, weights: Weights) -> float:
    """Return the seconds of the gradients' norm, Adam's update, and of all that passes over weights or gradients once a step.

    A rank updates its share of the weights, and sets all its gradients to zero, of which it has a share under FSDP alone.
    """
    code = workload.code
    if code.shards_weights or workload.distributed_optimizer:
        own = weights.dense / workload.replicas + weights.experts / workload.expert_replicas
    else:
        own = float(weights.total)
    if workload.optimizer_states == "bf16":
        moved = own * (ADAM_BYTES["bf16"][code.optimizer] + ASSUMED["norm_bytes"] / 2)
    else:
        copied = 0 if code.shards_weights else ASSUMED["copy_bytes"]
        moved = own * (ADAM_BYTES["fp32"][code.optimizer] + ASSUMED["norm_bytes"] + copied)
    if code.zeroes_gradients:
        moved += workload.gradient_bytes * (own if code.shards_weights else weights.total)
    if workload.narrow:
        moved += 6 * weights.fp8_matrices
    return moved / rates.bandwidth
