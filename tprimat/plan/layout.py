"""Divide a model and a batch over ranks, and check every rule of Megatron-Core before anything starts.

The rule for key/value heads is the strict one, whole heads on every rank. Megatron-Core 0.15 requires it; 0.16 would also
copy heads if the degree is a multiple of their number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tprimat.config.schema import DataConfig, LayoutConfig
from tprimat.core.errors import LayoutError
from tprimat.core.models import ModelShape, divisors, split_counts, valid_tensor_degrees
from tprimat.core.workload import Layout

TENSOR = "tensor_model_parallel_size"
PIPELINE = "pipeline_model_parallel_size"
VIRTUAL = "virtual_pipeline_model_parallel_size"
CONTEXT = "context_parallel_size"
EXPERT = "expert_model_parallel_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """What to divide, and where the configuration says so."""

    shape: ModelShape
    layout: LayoutConfig
    data: DataConfig
    world_size: int
    where_layout: Callable[[str], str]
    """Key of LayoutConfig -> its place."""
    where_data: Callable[[str], str]
    """Key of DataConfig -> its place."""

    @property
    def micro_batch(self) -> int:
        """The layout's own micro-batch size, or training.data's."""
        return self.layout.micro_batch_size or self.data.micro_batch_size


def resolve(request: LayoutRequest) -> tuple[Layout, int]:
    """Derive the data-parallel degree, and check the batch against it.

    Returns:
        The layout, and the sequences of a micro-batch.

    Raises:
        LayoutError: a rule is broken; names the first one.
    """
    _check_heads(request)
    _check_layers(request)
    layout = _divide_ranks(request)
    _check_sequence(request, layout)
    return layout, _divide_batch(request, layout)


def _any_of(degrees: list[int], key: str, request: LayoutRequest) -> str:
    """Name the degrees that can be chosen for a key; where it divides the ranks, those that fit them and the other degrees."""
    dividing = (TENSOR, PIPELINE, CONTEXT)
    others = math.prod(getattr(request.layout, other) for other in dividing if other != key)
    fitting = [degree for degree in degrees if key not in dividing or request.world_size % (degree * others) == 0]
    *most, last = map(str, fitting or degrees)
    return f"{key}: {', '.join(most)} or {last}" if most else f"{key}: {last}"


def _check_heads(request: LayoutRequest) -> None:
    shape, tensor = request.shape, request.layout.tensor_model_parallel_size
    for name, count in split_counts(shape).items():
        if count % tensor:
            raise LayoutError(
                f"{name} ({count}) must be a multiple of {TENSOR} ({tensor}).",
                where=request.where_layout(TENSOR),
                why=f"{shape.name} has {shape.heads} attention heads, {shape.kv_heads} key/value heads and a feed-forward width "
                f"of {shape.ffn}; each rank needs whole heads of both and an equal share of the width.",
                fix=_any_of(valid_tensor_degrees(shape), TENSOR, request),
            )


def _check_layers(request: LayoutRequest) -> None:
    layers, pipeline = request.shape.layers, request.layout.pipeline_model_parallel_size
    virtual = request.layout.virtual_pipeline_model_parallel_size
    if layers % pipeline:
        raise LayoutError(
            f"num_layers ({layers}) must be a multiple of pipeline_model_parallel_size ({pipeline}).",
            where=request.where_layout(PIPELINE),
            why=f"Each of the {pipeline} stages of {request.shape.name} holds the same number of layers.",
            fix=_any_of(divisors(layers), PIPELINE, request),
        )
    if virtual is None:
        return
    if pipeline == 1:
        raise LayoutError(
            f"virtual_pipeline_model_parallel_size is {virtual}, and there is a single pipeline stage.",
            where=request.where_layout(VIRTUAL),
            why="The interleaved schedule needs pipeline_model_parallel_size over 1.",
            fix=f"leave {VIRTUAL} out, or raise {PIPELINE}",
        )
    if (layers // pipeline) % virtual:
        raise LayoutError(
            f"The {layers // pipeline} layers of a stage must be a multiple of virtual_pipeline_model_parallel_size ({virtual}).",
            where=request.where_layout(VIRTUAL),
            why="Each stage is cut into chunks of the same number of layers.",
            fix=_any_of(divisors(layers // pipeline), VIRTUAL, request),
        )


def _divide_ranks(request: LayoutRequest) -> Layout:
    requested, world = request.layout, request.world_size
    parts = requested.tensor_model_parallel_size * requested.pipeline_model_parallel_size * requested.context_parallel_size
    product = f"{TENSOR} x {PIPELINE} x {CONTEXT} = {parts}"
    if world % parts:
        what = f"world size ({world}) is not divisible by {parts}."
        fix = f"--gpus {parts * max(1, world // parts)}, or degrees with a smaller product"
        largest = max((TENSOR, PIPELINE, CONTEXT), key=lambda degree: getattr(requested, degree))
        raise LayoutError(what, where=request.where_layout(largest), why=f"{product} ranks hold one replica.", fix=fix)
    data = world // parts
    if requested.data_parallel_size not in {None, data}:
        raise LayoutError(
            f"data_parallel_size is {requested.data_parallel_size}, and {world} ranks leave {data}.",
            where=request.where_layout("data_parallel_size"),
            why=f"{product}, and TP x PP x CP x DP must equal the {world} ranks.",
            fix="leave data_parallel_size out: it follows from the ranks",
        )
    _check_experts(request, data)
    parallel = requested.sequence_parallel
    return Layout(
        tensor=requested.tensor_model_parallel_size,
        pipeline=requested.pipeline_model_parallel_size,
        virtual_pipeline=requested.virtual_pipeline_model_parallel_size,
        context=requested.context_parallel_size,
        expert=requested.expert_model_parallel_size,
        data=data,
        sequence_parallel=requested.tensor_model_parallel_size > 1 if parallel == "auto" else parallel,
    )


def _check_experts(request: LayoutRequest, data: int) -> None:
    expert, experts = request.layout.expert_model_parallel_size, request.shape.experts or 0
    if expert == 1:
        return
    where = request.where_layout(EXPERT)
    if not experts:
        what = f"expert_model_parallel_size is {expert}, and {request.shape.name} has no experts."
        why = "Expert parallelism spreads the experts of a mixture over the ranks; a dense model has none to spread."
        raise LayoutError(what, where=where, why=why, fix=f"{EXPERT}: 1, or a model with experts")
    layout = request.layout
    ranks = layout.tensor_model_parallel_size * layout.context_parallel_size * data
    fix = _any_of(divisors(math.gcd(experts, ranks)), EXPERT, request)
    if experts % expert:
        what = f"num_moe_experts ({experts}) must be a multiple of expert_model_parallel_size ({expert})."
        raise LayoutError(what, where=where, fix=fix)
    if ranks % expert:
        pipeline = layout.pipeline_model_parallel_size
        what = (
            f"world_size ({ranks * pipeline}) is not divisible by expert_tensor_model_pipeline_parallel size "
            f"({expert * pipeline})."
        )
        why = f"Whole experts are spread over the ranks of a stage, of which TP x CP x DP leaves {ranks}."
        raise LayoutError(what, where=where, why=why, fix=fix)


def _check_sequence(request: LayoutRequest, layout: Layout) -> None:
    if layout.sequence_parallel and layout.tensor == 1:
        raise LayoutError(
            f"sequence_parallel is true, and {TENSOR} is 1.",
            where=request.where_layout("sequence_parallel"),
            why="Sequence parallelism cuts a sequence over the tensor-parallel ranks.",
            fix=f"sequence_parallel: auto, or raise {TENSOR}",
        )
    if request.shape.experts and layout.tensor > 1 and not layout.sequence_parallel:
        raise LayoutError(
            "MoE and tensor parallelism are enabled without also enabling sequence parallelism.",
            where=request.where_layout("sequence_parallel"),
            why="Each tensor rank would compute the same tokens once more, and Megatron-Core stops in the first step.",
            fix="sequence_parallel: auto",
        )
    tokens, where = request.data.sequence_length, request.where_data("sequence_length")
    if tokens > request.shape.context_tokens:
        what = f"sequence_length is {tokens}, and {request.shape.name} takes at most {request.shape.context_tokens} tokens."
        raise LayoutError(what, where=where, fix=f"sequence_length: {request.shape.context_tokens}")
    cut = layout.context * (2 if layout.context > 1 else 1) * (layout.tensor if layout.sequence_parallel else 1)
    if tokens % cut:
        reasons = [f"{2 * layout.context} pieces of context parallelism"] * (layout.context > 1)
        reasons += [f"{layout.tensor} ranks of sequence parallelism"] * layout.sequence_parallel
        what = f"sequence_length ({tokens}) must be a multiple of {cut}."
        degree = CONTEXT if layout.context > 1 else TENSOR
        fix = f"sequence_length: {max(cut, tokens // cut * cut)}, or another {degree}"
        raise LayoutError(what, where=where, why=f"It is cut into {' and '.join(reasons)}.", fix=fix)


def _divide_batch(request: LayoutRequest, layout: Layout) -> int:
    whole, micro = request.data.global_batch_size, request.micro_batch
    if whole % (micro * layout.data):
        fitting = None if whole % layout.data else max(size for size in range(1, micro) if whole // layout.data % size == 0)
        what = f"micro batch size ({micro}) times data parallel size ({layout.data})"
        raise _indivisible(request, what, micro * layout.data, fitting)
    _check_accumulation(request, layout, whole // (micro * layout.data))
    return micro


def _indivisible(request: LayoutRequest, what: str, unit: int, fitting: int | None) -> LayoutError:
    """Build the error. `fitting` is the next smaller micro-batch that divides; None if there is none."""
    whole = request.data.global_batch_size
    nearest = max(1, round(whole / unit)) * unit
    return LayoutError(
        f"global batch size ({whole}) is not divisible by {what}.",
        where=request.where_data("global_batch_size"),
        why="Every replica runs the same number of whole micro-batches in a step.",
        fix=f"global_batch_size: {nearest}" + ("" if fitting is None else f", or micro_batch_size: {fitting}"),
    )


def _check_accumulation(request: LayoutRequest, layout: Layout, steps: int) -> None:
    stated = request.layout.gradient_accumulation_steps
    if stated not in {None, steps}:
        raise LayoutError(
            f"gradient_accumulation_steps is {stated}, and the batch gives {steps}.",
            where=request.where_layout("gradient_accumulation_steps"),
            why=f"{request.data.global_batch_size} sequences / (micro_batch_size {request.micro_batch} x DP {layout.data}).",
            fix="leave gradient_accumulation_steps out: it follows from the batch",
        )
    if layout.virtual_pipeline is not None and steps % layout.pipeline:
        raise LayoutError(
            f"The {steps} micro-batches of a step must be a multiple of pipeline_model_parallel_size ({layout.pipeline}).",
            where=request.where_layout(VIRTUAL),
            why="The interleaved schedule runs micro-batches in rounds of one a stage.",
            fix=f"another global_batch_size or micro_batch_size, or leave {VIRTUAL} out",
        )
