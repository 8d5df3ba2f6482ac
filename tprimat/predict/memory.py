"""Predict the memory of a training step on each rank, by part.

What stays from step to step (weights, gradients, master weights, moments) is counted. Activations are derived: each module
of a layer keeps the tensors that its backward pass reads, and a tensor that two modules keep counts once (Korthikanti et al.,
arXiv 2205.05198, section 4, do so for one such layer). A stage holds them for as many micro-batches as its schedule has in
flight. On top comes the largest of a few moments: the loss, its backward pass, and the backward pass of a layer.

All sizes are bytes. torch rounds each tensor up to 512 bytes, which is not counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from tprimat.core.rows import DATA, document
from tprimat.core.workload import ATTENTION_ALONE, MOMENTS_IN_BF16, FullWorkload
from tprimat.predict.calibration import margin_of
from tprimat.predict.stages import Stage, Weights, chunks_in_flight, layer_weights, stages_of, weights_of

Part = Literal["weights", "gradients", "optimizer", "8-bit copies", "activations", "loss", "backward", "buffers"]

FP32_BYTES = 4
MOMENTS = 2
FIGURES = document(DATA / "prediction.yaml")
ASSUMED: Mapping[str, float] = FIGURES["memory"]
MODULES: Mapping[str, Mapping[str, Mapping[str, list[str]]]] = FIGURES["modules"]
"""recomputed or offloaded -> module -> any layer, or what it has -> fields of LayerActivations."""
Fit = Literal["fits", "too tight to promise", "does not fit"]
CONTEXT_BYTES = 2**30
"""What the driver, kernels, cuDNN and NCCL take beside torch's allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """The memory of the pipeline stage that needs most, at its peak."""

    parts: Mapping[Part, int]
    stage: int
    """Pipeline rank, from 0."""
    moment: str
    """What runs at the peak."""
    margin: float
    """What the allocator may reserve beyond what is allocated, and what the prediction may be too low by, as a share."""

    @property
    def allocated_bytes(self) -> int:
        """Peak of tensors: what torch.cuda.max_memory_allocated reports."""
        return sum(self.parts.values())

    @property
    def reserved_bytes(self) -> int:
        """Peak that torch's allocator holds, fragments included."""
        return round(self.allocated_bytes * (1 + ASSUMED["fragments"]))

    @property
    def device_bytes(self) -> int:
        """The most that it takes of the accelerator, unless it reserves more than 98 % of the runs that the margin comes from."""
        return round(self.allocated_bytes * (1 + self.margin)) + CONTEXT_BYTES

    @property
    def expected_device_bytes(self) -> int:
        """What it takes of the accelerator if it has as many fragments as most runs."""
        return self.reserved_bytes + CONTEXT_BYTES

    def missing_bytes(self, room: int) -> int:
        """Return what so many bytes of a device lack for a promise that it runs; 0: nothing."""
        return max(0, self.device_bytes - int(room * (1 - ASSUMED["noise_of_margins"])))

    def fit(self, room: int) -> Fit:
        """Return whether it runs in so many bytes of a device: surely, perhaps, or not even if the prediction is too high."""
        if not self.missing_bytes(room):
            return "fits"
        least = self.allocated_bytes * (1 - ASSUMED["error"]) + CONTEXT_BYTES
        return "too tight to promise" if least <= room else "does not fit"


KnownParts = dict[object, Any]
"""What was computed for other layouts of one search: by what it depends on."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank of one stage: what it holds whatever the micro-batch and recomputation."""

    stage: Stage
    states: "Mapping[Part, int]"
    fixed: int
    """Their sum."""
    widened: int
    """Copies of gradients that the update needs, see `_widened_gradients`."""
    margin: float


class PeakMoment(NamedTuple):
    """What is needed at a moment besides what is kept, in bytes."""

    name: str
    loss: int
    backward: int
    buffers: int


UPDATE = "update of the weights"


def predict_memory(workload: FullWorkload, known: KnownParts | None = None, *, last_stage: bool = False) -> MemoryPrediction:
    """Return the memory of the stage that needs most: the first, the last, or the first between them with its layers.

    Later stages of the same layers hold fewer micro-batches. Megatron-LM logs the memory of the last to TensorBoard.
    """
    known, layout = {} if known is None else known, workload.layout
    split = layout.tensor, layout.context, layout.expert, workload.code.shards_weights
    held = layout.pipeline, layout.virtual_pipeline, layout.data, *split
    if (places := known.get(held)) is None:
        stages = stages_of(workload)
        between = {stage.chunks: stage for stage in reversed(stages[1:-1])}
        places = [_place(workload, stage) for stage in (stages[0], *reversed(between.values()), *stages[-1:])]
        known[held] = places
    variant = workload.recompute, workload.micro_batch, *split
    if (layers := known.get(variant)) is None:
        layers = known[variant] = _layers(workload, known)
    predicted: list[tuple[int, Place, PeakMoment, int]] = []
    for place in places[-1:] if last_stage else places:
        kind = *variant, place.stage.kind
        if (moment := known.get(kind)) is None:
            moment = known[kind] = _worst_moment(workload, place.stage, layers)
        activations = _kept_activations(workload, place.stage, layers)
        needed = activations + moment.loss + moment.backward
        if place.widened > needed:
            activations, needed, moment = 0, place.widened, PeakMoment(UPDATE, 0, 0, moment.buffers)  # activations are gone
        predicted.append((place.fixed + needed + moment.buffers, place, moment, activations))
    _, place, moment, activations = max(predicted, key=lambda peak: peak[0])
    widened = place.widened if moment.name == UPDATE else 0
    parts: dict[Part, int] = {
        **place.states,
        "gradients": place.states["gradients"] + widened,
        "activations": activations,
        "loss": moment.loss,
        "backward": moment.backward,
        "buffers": moment.buffers,
    }
    return MemoryPrediction(parts=parts, stage=place.stage.index, moment=moment.name, margin=place.margin)


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """A layer's activations of one micro-batch, in bytes."""

    activations: "LayerActivations"
    total: int
    on_device: int
    """Those that stay on the device from its forward to its backward pass, unless all layers are recomputed."""
    offloaded: int = 0
    """Those that wait in main memory meanwhile."""


Layers = Mapping[bool, KeptLayer]
"""By whether a layer has experts."""


def _layers(workload: FullWorkload, known: KnownParts) -> Layers:
    place = "layers", workload.micro_batch, workload.layout.tensor, workload.layout.context, workload.layout.expert, workload.code
    if (layers := known.get(place)) is None:  # whatever is computed again
        kinds = (False, True) if workload.shape.experts else (False,)
        layers = known[place] = {moe: layer_activations(workload, moe=moe) for moe in kinds}
    return {moe: _kept(workload, kept) for moe, kept in layers.items()}


def _kept(workload: FullWorkload, layer: "LayerActivations") -> KeptLayer:
    modules, selective = workload.recompute_modules, workload.recompute == "selective"
    if selective and workload.code.selects_operations and not modules:
        return KeptLayer(layer, layer.total, round(layer.total * ASSUMED["kept_by_selected_operations"]))
    again = layer.of_modules(modules or ATTENTION_ALONE, "recomputed") if selective else set()
    if workload.code.keeps_gathered_inputs and workload.sequence_ranks > 1:
        again.discard("norm_outputs")  # what is kept is not the norm's output, but that of all tensor ranks
    moved = layer.of_modules(workload.offloaded or (), "offloaded")
    stays, on_device = layer.without(again), layer.without(again | moved)
    return KeptLayer(layer, layer.total, on_device, stays - on_device)


def _place(workload: FullWorkload, stage: Stage) -> Place:
    weights = weights_of(workload, stage)
    states = state_bytes(workload, weights)
    return Place(stage, states, sum(states.values()), _widened_gradients(workload, weights), margin_of(workload))


def _widened_gradients(workload: FullWorkload, weights: Weights) -> int:
    """Return the copies of gradients that exist when activations are gone.

    Those that other replicas sent, or in fp32 of gradients in bf16, which the update of fp32 masters needs.
    """
    code, received = workload.code, 0
    if workload.sums_in_fp32 and workload.distributed_optimizer and not code.shards_weights:
        received = workload.gradient_bytes * weights.total
    if workload.gradient_bytes == FP32_BYTES or workload.optimizer_states == "bf16" or code.shards_weights:
        return received
    if workload.distributed_optimizer and (not code.widens_gradients or workload.optimizer_states == MOMENTS_IN_BF16):
        return received
    shards = (workload.replicas, workload.expert_replicas) if workload.distributed_optimizer else (1, 1)
    return max(received, FP32_BYTES * (weights.dense // shards[0] + weights.experts // shards[1]))


def state_bytes(workload: FullWorkload, weights: Weights) -> dict[Part, int]:
    """Return what one rank keeps from step to step for its weights.

    FSDP2 keeps fp32 weights, gradients and moments of its share; unsharded bf16 weights come and go (see `_buffers`).
    """
    total, low = weights.total, workload.matmul_dtype != "fp32"
    sharded = workload.code.shards_weights or workload.distributed_optimizer
    shards = (workload.replicas, workload.expert_replicas) if sharded else (1, 1)
    if workload.code.shards_weights:
        own = (2 if workload.optimizer_states == "bf16" else FP32_BYTES) * (
            weights.dense // shards[0] + weights.experts // shards[1]
        )
        return {"weights": own, "gradients": own, "optimizer": MOMENTS * own, "8-bit copies": 0}
    narrow = round(2 * workload.narrow_bytes * weights.fp8_matrices) if workload.narrow else 0
    """As they are and transposed."""
    alone = workload.narrow_weights_alone
    alone = workload.narrow and (workload.code.keeps_fp8_weights_alone if alone is None else alone)
    copies = 0 if alone else narrow
    held = 2 * (total - weights.fp8_matrices) + narrow if alone else 2 * total
    if workload.optimizer_states == "bf16":
        return {"weights": held, "gradients": 2 * total, "optimizer": MOMENTS * 2 * total, "8-bit copies": copies}
    moments = 2 if workload.optimizer_states == MOMENTS_IN_BF16 else FP32_BYTES
    states = FP32_BYTES * low + MOMENTS * moments
    return {
        "weights": held if low else 4 * total,
        "gradients": workload.gradient_bytes * total,
        "optimizer": states * weights.dense // shards[0] + states * weights.experts // shards[1],
        "8-bit copies": copies,
    }


# Activations of one layer for one micro-batch on one rank: module -> bytes.


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """What one layer keeps for its backward pass, by what recomputation can drop."""

    stream: int
    """Inputs of both norms: the residual stream."""
    norm_statistics: int
    """One number a row, or two, of both norms."""
    norm_outputs: int
    attention_inputs: int
    """Queries, keys and values."""
    attention_output: int
    attention_scores: int
    """Of unfused attention, and the sums of flash attention."""
    latents: int
    """Of latent attention: compressed queries, keys and values."""
    masks: int
    """Of dropout on the residual branches."""
    router: int
    dispatched: int
    """Tokens as the experts receive them."""
    returned: int
    """Their results as the tokens' ranks receive them."""
    hidden: int
    """Outputs of the first feed-forward matrix."""
    activated: int
    """Inputs of the second."""
    shared_hidden: int
    """Both, of shared experts, and under fp8 their own copy of the norm's output."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(_ALL_FIELDS(self))

    def of_modules(self, modules: tuple[str, ...], what: str) -> set[str]:
        """Return the fields that are computed again (`what`: recomputed) or wait in main memory (offloaded) with some modules."""
        kinds = ["any", "experts" if self.dispatched else "dense", *["latents"] * (self.latents > 0)]
        return {field for module in modules for kind in kinds for field in MODULES[what].get(module, {}).get(kind, ())}

    def without(self, fields: set[str]) -> int:
        """Return what is left without some fields."""
        return self.total - sum(int(getattr(self, name)) for name in fields)


_ALL_FIELDS: Callable[[LayerActivations], tuple[int, ...]] = attrgetter(*LayerActivations.__slots__)


def layer_activations(workload: FullWorkload, *, moe: bool) -> LayerActivations:
    """Return what one layer keeps of one micro-batch on one rank."""
    shape, layout, code = workload.shape, workload.layout, workload.code
    tokens, size, tensor = workload.tokens, workload.element_bytes, layout.tensor
    split = tokens // workload.sequence_ranks
    stored = _bytes_of_inputs(workload, routed=False)
    stream = split * shape.hidden * size
    gathered = tokens if code.keeps_gathered_inputs else split
    query, values = shape.heads * shape.head_dim // tensor, shape.heads * shape.value_dim // tensor
    keys = (shape.heads if shape.kv_lora_rank is not None else shape.kv_heads) * shape.head_dim // tensor
    key_values = (shape.heads * (shape.head_dim + shape.value_dim) // tensor) if shape.kv_lora_rank is not None else 2 * keys
    gathers = code.gathers_keys_values and layout.context > 1
    attention_inputs = tokens * (query + key_values * (layout.context if gathers else 1)) * size
    if code.keeps_joint_projection and shape.kv_lora_rank is None:
        attention_inputs += tokens * (query + keys) * size
    if shape.qk_norm and not code.keeps_joint_projection and shape.kv_lora_rank is None:
        attention_inputs += tokens * (query + key_values) * size  # as they were before their norms
    output = tokens * values * size * (2 if gathers else 1)  # the halves of a sequence are attended to apart, and joined
    if workload.narrow:
        output += round(tokens * values * stored)  # attention keeps its output, the projection a narrow copy of it
    ffn = _feed_forward(workload, moe=moe)
    if shape.gated and not code.fused_activation:
        ffn["hidden"] *= 2  # silu(gate) and the shifted other half, besides the two halves
    return LayerActivations(
        stream=2 * stream,
        norm_statistics=2 * split * FP32_BYTES * (2 if shape.norm == "layernorm" else 1),
        norm_outputs=_norm_outputs(workload, split, gathered, moe=moe),
        attention_inputs=attention_inputs,
        attention_output=output,
        attention_scores=_scores(workload),
        latents=_latents(workload, split, stored),
        masks=2 * split * shape.hidden if workload.hidden_dropout else 0,
        **ffn,
    )


def _bytes_of_inputs(workload: FullWorkload, *, routed: bool) -> float:
    """Return the bytes of a number that a product, of routed experts or of another matrix, keeps for its weight's gradient."""
    in_bf16 = routed and workload.code.expert_wgrad_in_bf16
    return workload.narrow_bytes if workload.narrow and not in_bf16 else workload.element_bytes


def _norm_outputs(workload: FullWorkload, split: int, gathered: int, *, moe: bool) -> int:
    """Return what is kept of both norms' outputs: under fp8 a copy for each product that reads them, and the router's in bf16."""
    hidden, size = workload.shape.hidden, workload.element_bytes
    if not workload.narrow:
        return 2 * gathered * hidden * size
    copy = round(gathered * hidden * workload.narrow_bytes)
    attention = copy * (1 if workload.shape.kv_lora_rank is None else 2)
    return attention + (split * hidden * size if moe else copy)


def _scores(workload: FullWorkload) -> int:
    shape, size = workload.shape, workload.element_bytes
    heads = shape.heads // workload.layout.tensor
    if workload.code.attention == "flash":
        return workload.tokens * heads * FP32_BYTES
    kept = size + (1 + size if workload.attention_dropout else 0)
    return workload.tokens * workload.sequence_tokens * heads * kept


def _latents(workload: FullWorkload, split: int, stored: float) -> int:
    shape, size = workload.shape, workload.element_bytes
    if shape.kv_lora_rank is None:
        return 0
    query = shape.q_lora_rank or 0
    inputs = query + shape.kv_lora_rank + (shape.rope_head_dim or 0)
    return round(split * (inputs * size + (query + shape.kv_lora_rank) * stored))


def _feed_forward(workload: FullWorkload, *, moe: bool) -> dict[str, int]:
    shape, size, tensor = workload.shape, workload.element_bytes, workload.layout.tensor
    stored, routed = _bytes_of_inputs(workload, routed=False), _bytes_of_inputs(workload, routed=True)
    halves = 2 if shape.gated else 1
    if not moe:
        width = workload.tokens * (shape.ffn // tensor)
        no_experts = dict.fromkeys(("router", "dispatched", "returned", "shared_hidden"), 0)
        return {"hidden": halves * width * size, "activated": round(width * stored), **no_experts}
    code = workload.code
    experts, chosen, inner = shape.experts or 0, shape.experts_per_token or 0, shape.expert_ffn or 0
    split = workload.tokens // workload.sequence_ranks
    rows = _room_for_rows(workload)
    width = inner // workload.expert_tensor_ranks
    shared = shape.shared_experts * inner // tensor
    copied = round(workload.tokens * shape.hidden * workload.narrow_bytes) if shared and workload.narrow else 0
    returned = size * code.keeps_returned_rows + FP32_BYTES * code.weighs_experts_in_fp32
    return {
        # Scores and probabilities in fp32 and the map, of all experts; indices, places and weights of the chosen ones.
        "router": split * (experts * (2 * FP32_BYTES + 1) + chosen * (8 + 8 + FP32_BYTES)),
        "dispatched": round(rows * shape.hidden * routed),
        "returned": split * chosen * shape.hidden * returned,
        # Without SwiGLU no fused function weights the result, so that it exists before and after.
        "hidden": rows * (halves if shape.gated else 2) * width * size + (0 if code.keeps_returned_rows else rows * FP32_BYTES),
        "activated": round(rows * width * routed),
        "shared_hidden": round(workload.tokens * (halves * shared * size + shared * stored)) + copied,
    }


def expert_rows(workload: FullWorkload) -> int:
    """Return the tokens that the experts of one rank receive from a micro-batch when they are spread evenly."""
    chosen = workload.shape.experts_per_token or 0
    return workload.tokens // workload.sequence_ranks * chosen * workload.expert_tensor_ranks


def _room_for_rows(workload: FullWorkload) -> int:
    """Return the rows for which that rank has buffers: some rank receives a little more than others, and takes a step more."""
    step = workload.code.received_rows_step if workload.layout.expert > 1 else 0.0
    return int(expert_rows(workload) * (1 + step))


def _kept_activations(workload: FullWorkload, stage: Stage, layers: Layers) -> int:
    """Return the activations of all micro-batches in flight on one rank of a stage.

    Of what is offloaded, the last layer's stays, so that its backward pass need not wait, and another layer's is traveling
    (fine_grained_activation_offload.py of Megatron-Core).
    """
    total = stage.mtp_layers * layers[bool(workload.shape.experts)].on_device + 2 * layers[stage.moe_layers > 0].offloaded
    for chunk, held in chunks_in_flight(workload, stage):
        total += held * _kept_by_chunk(workload, layers, *chunk)
    return total


def _kept_by_chunk(workload: FullWorkload, layers: Layers, dense: int, moe: int) -> int:
    if workload.recompute != "full":
        return _kept_whole(layers, dense, moe)
    input_bytes = stream_bytes(workload)
    if workload.recompute_layers is None:
        return -(-(dense + moe) // (workload.recompute_every or 1)) * input_bytes
    first = min(workload.recompute_layers, dense + moe)
    left_dense = max(0, dense - first)
    left_moe = moe - max(0, first - dense)
    return first * input_bytes + _kept_whole(layers, left_dense, left_moe)


def _kept_whole(layers: Layers, dense: int, moe: int) -> int:
    return dense * layers[False].on_device + (moe * layers[True].on_device if moe else 0)


def stream_bytes(workload: FullWorkload) -> int:
    """Return the residual stream of one micro-batch on one rank: what travels between stages."""
    return workload.tokens // workload.sequence_ranks * workload.shape.hidden * workload.element_bytes


# The moments at which memory can peak, besides what is kept.


def _worst_moment(workload: FullWorkload, stage: Stage, layers: Layers) -> PeakMoment:
    """Return the moment with the largest need: the loss, its backward pass, or the backward pass of a layer."""
    layer, buffers = _backward_of_layer(workload, stage, layers), _buffers(workload, stage)
    moments = [PeakMoment("backward pass of a layer", 0, layer, buffers)]
    if stage.output:
        forward, backward = _loss(workload)
        moments += [PeakMoment("loss", forward, 0, buffers), PeakMoment("backward pass of the loss", backward, 0, buffers)]
    return max(moments, key=lambda moment: moment.loss + moment.backward)


def _loss(workload: FullWorkload) -> tuple[int, int]:
    """Return what loss and output layer need, forward and backward."""
    shape, code, size, tokens = workload.shape, workload.code, workload.element_bytes, workload.tokens
    words = workload.vocabulary // workload.layout.tensor
    hidden = tokens * shape.hidden
    split = hidden // workload.sequence_ranks
    weight = 0 if code.reuses_dummy_gradients else words * shape.hidden * size
    if workload.loss == "chunked":
        # While one chunk's logits are multiplied, the last chunk's logits and gradient still exist.
        chunk = min(code.loss_chunk_tokens, tokens) * words * size
        copies = 3 if tokens > code.loss_chunk_tokens else 2
        forward = chunk * copies + (split + 2 * hidden) * size
        if code.eager_loss:
            # Probabilities, the targets as numbers, their difference, and the targets as a mask.
            forward += chunk // size * (3 * FP32_BYTES + 1) - chunk
        if workload.sequence_ranks > 1:
            forward += split * size
        backward = split * size + hidden * (size + 2 * FP32_BYTES) + weight
        if not code.accumulates_weight_gradients or shape.tied_embeddings:
            # The weight's gradient waits in fp32 from the forward pass, is scaled into a second tensor, and converted.
            fp32 = words * shape.hidden * FP32_BYTES
            forward += fp32
            backward = max(backward + fp32, (split + hidden) * size + 2 * fp32 + words * shape.hidden * size)
        return forward, backward
    logits = tokens * words
    copies = {"in_place": 0, "copied": size, "compiled_away": 0, "native": FP32_BYTES, "compiled": 2 * FP32_BYTES}[workload.loss]
    kept = FP32_BYTES if workload.loss in {"native", "compiled"} else size
    earlier = (workload.mtp_layers or 0) * logits * kept
    ends = 2 * split * size
    forward = logits * (size + copies) + ends + earlier
    softmax = {"in_place": 0, "copied": 0, "compiled_away": size}.get(workload.loss, FP32_BYTES)
    produced = logits * size + weight + hidden * size
    if code.shards_weights:
        produced += words * shape.hidden * FP32_BYTES  # the gradient as the reduce-scatter sends it
    return forward, max(logits * (size + softmax), produced) + ends + earlier


def _backward_of_layer(workload: FullWorkload, stage: Stage, layers: Layers) -> int:
    """Return what the backward pass of one layer needs besides what the layer kept."""
    moe = stage.moe_layers > 0
    kept = layers[moe]
    size = workload.element_bytes
    stream = stream_bytes(workload)
    # The activation's backward pass: gradients of both its sides exist, and its output is no longer needed.
    activated = kept.activations.activated
    gradients = stream + round(activated * size / _bytes_of_inputs(workload, routed=moe)) + kept.activations.hidden - activated
    if moe:
        gradients += _backward_of_experts(workload)
    if workload.code.attention != "flash":  # later, of the scores
        heads = workload.shape.heads // workload.layout.tensor
        gradients = max(gradients, stream + workload.tokens * workload.sequence_tokens * heads * size)
    if workload.recompute == "full":
        count = workload.recompute_every or 1
        return gradients + kept.total * min(count, max(stage.layers, 1))
    return gradients + kept.total - kept.on_device


def _backward_of_experts(workload: FullWorkload) -> int:
    """Return what else exists while rows' gradients travel back: those that arrived, and in the embedded engine both ends'."""
    code, size = workload.code, workload.element_bytes
    rows = _room_for_rows(workload) * workload.shape.hidden * size
    if not code.keeps_returned_rows:
        return rows
    weights = layer_weights(workload, moe=True).experts * size  # gradients, before they are added to the buffer
    sent = workload.tokens // workload.sequence_ranks * (workload.shape.experts_per_token or 0) * workload.shape.hidden * size
    return rows + (rows + sent if workload.layout.expert > 1 else rows) + weights


def _buffers(workload: FullWorkload, stage: Stage) -> int:
    """Return workspaces, dummy gradients, gathered weights, and buffers for exchanges between ranks."""
    code, shape, size = workload.code, workload.shape, workload.element_bytes
    total = code.buffers_bytes
    if code.reuses_dummy_gradients:
        words = workload.vocabulary // workload.layout.tensor
        counts = {False: stage.dense_layers, True: stage.moe_layers}
        sets = counts if code.captures_layers else {moe: min(count, 1) for moe, count in counts.items()}
        total += sum(count * _dummy_gradients(workload, moe=moe) for moe, count in sets.items() if count)
        total += words * shape.hidden * size if stage.output else 0
    if workload.sequence_ranks > 1 and not code.keeps_gathered_inputs:
        total += workload.tokens * shape.hidden * size
    if code.shards_weights:
        layer = layer_weights(workload, moe=stage.moe_layers > 0)
        table = workload.vocabulary // workload.layout.tensor * shape.hidden
        total += size * (2 * layer.total + (table if stage.output else 0))
    return total


def _dummy_gradients(workload: FullWorkload, *, moe: bool) -> int:
    """Return one gradient for each shape of weight in a layer, in the dtype of the weights."""
    weights = layer_weights(workload, moe=moe)
    experts = (workload.shape.experts or 1) // workload.layout.expert
    routed = weights.experts // max(1, experts)
    return workload.element_bytes * (weights.fp8_matrices - weights.experts + routed)
