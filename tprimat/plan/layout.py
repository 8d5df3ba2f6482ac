"""Divide a model and a batch over ranks, and check every rule of Megatron-Core before anything starts.

The rule for key/value heads is the strict one, whole heads on every rank. Megatron-Core 0.15 requires it; 0.16 would also
copy heads if the degree is a multiple of their number.
"""

import math
from collections.abc import Callable, Iterable, Iterator
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


Rule = tuple[object, str, str, str | None, str]
"""True where it is broken; the key at fault, what is wrong, why that is a rule, and the way out."""


def resolve(request: LayoutRequest) -> tuple[Layout, int]:
    """Derive the data-parallel degree, check the batch against it, and return the layout with the sequences of a micro-batch.

    A LayoutError names the first rule that is broken.
    """
    asked, data = request.layout, request.data
    _check(request, _rules_of_model(request))
    tensor, pipeline, context = (getattr(asked, degree) for degree in (TENSOR, PIPELINE, CONTEXT))
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=asked.virtual_pipeline_model_parallel_size,
        context=context,
        expert=asked.expert_model_parallel_size,
        data=request.world_size // (tensor * pipeline * context),
        sequence_parallel=tensor > 1 if asked.sequence_parallel == "auto" else asked.sequence_parallel,
    )
    micro = asked.micro_batch_size or data.micro_batch_size
    for rules in (_rules_of_ranks(request, layout), _rules_of_sequence(request, layout), _rules_of_batch(request, layout, micro)):
        _check(request, rules)
    return layout, micro


def _check(request: LayoutRequest, rules: Iterable[Rule]) -> None:
    for broken, key, what, why, fix in rules:
        if broken:
            where = request.where_data if key in {"sequence_length", "global_batch_size"} else request.where_layout
            raise LayoutError(what, where=where(key), why=why, fix=fix)


def _any_of(degrees: list[int], key: str, request: LayoutRequest) -> str:
    """Name the degrees that can be chosen for a key; where it divides the ranks, those that fit them and the other degrees."""
    dividing = (TENSOR, PIPELINE, CONTEXT)
    others = math.prod(getattr(request.layout, other) for other in dividing if other != key)
    fitting = [degree for degree in degrees if key not in dividing or request.world_size % (degree * others) == 0]
    *most, last = map(str, fitting or degrees)
    return f"{key}: {', '.join(most)} or {last}" if most else f"{key}: {last}"


def _rules_of_model(request: LayoutRequest) -> Iterator[Rule]:
    """Yield what the heads, widths, layers and ranks must divide by."""
    shape, world = request.shape, request.world_size
    tensor, pipeline, context = (getattr(request.layout, degree) for degree in (TENSOR, PIPELINE, CONTEXT))
    why = (
        f"{shape.name} has {shape.heads} attention heads, {shape.kv_heads} key/value heads and a feed-forward width of "
        f"{shape.ffn}; each rank needs whole heads of both and an equal share of the width."
    )
    fix = _any_of(valid_tensor_degrees(shape), TENSOR, request)
    for name, count in split_counts(shape).items():
        yield count % tensor, TENSOR, f"{name} ({count}) must be a multiple of {TENSOR} ({tensor}).", why, fix
    what = f"num_layers ({shape.layers}) must be a multiple of {PIPELINE} ({pipeline})."
    why = f"Each of the {pipeline} stages of {shape.name} holds the same number of layers."
    yield shape.layers % pipeline, PIPELINE, what, why, _any_of(divisors(shape.layers), PIPELINE, request)
    if (virtual := request.layout.virtual_pipeline_model_parallel_size) is not None:
        what = f"{VIRTUAL} is {virtual}, but there is a single pipeline stage."
        why = f"The interleaved schedule needs {PIPELINE} over 1."
        yield pipeline == 1, VIRTUAL, what, why, f"leave {VIRTUAL} out, or raise {PIPELINE}"
        layers = shape.layers // pipeline
        what = f"The {layers} layers of a stage must be a multiple of {VIRTUAL} ({virtual})."
        why = "Each stage is cut into chunks of the same number of layers."
        yield layers % virtual, VIRTUAL, what, why, _any_of(divisors(layers), VIRTUAL, request)
    parts = tensor * pipeline * context
    largest = max((TENSOR, PIPELINE, CONTEXT), key=lambda degree: getattr(request.layout, degree))
    why = f"{TENSOR} x {PIPELINE} x {CONTEXT} = {parts} ranks hold one replica."
    fix = f"--gpus {parts * max(1, world // parts)}, or degrees with a smaller product"
    yield world % parts, largest, f"world size ({world}) is not divisible by {parts}.", why, fix


def _rules_of_ranks(request: LayoutRequest, layout: Layout) -> Iterator[Rule]:
    """Yield what is stated of replicas, and how experts are spread."""
    stated, world = request.layout.data_parallel_size, request.world_size
    what, why = (
        f"data_parallel_size is {stated}, but {world} ranks leave {layout.data}.",
        "TP x PP x CP x DP must equal the ranks.",
    )
    fix = "leave data_parallel_size out: it follows from the ranks"
    yield stated not in {None, layout.data}, "data_parallel_size", what, why, fix
    expert, experts = layout.expert, request.shape.experts or 0
    if expert == 1:
        return
    what, why = f"{EXPERT} is {expert}, but {request.shape.name} has no experts.", "A dense model has none to spread."
    yield not experts, EXPERT, what, why, f"{EXPERT}: 1, or a model with experts"
    ranks = layout.tensor * layout.context * layout.data
    fix = _any_of(divisors(math.gcd(experts, ranks)), EXPERT, request)
    yield experts % expert, EXPERT, f"num_moe_experts ({experts}) must be a multiple of {EXPERT} ({expert}).", None, fix
    size = expert * layout.pipeline
    what = f"world_size ({world}) is not divisible by expert_tensor_model_pipeline_parallel size ({size})."
    why = f"Whole experts are spread over the ranks of a stage, of which TP x CP x DP leaves {ranks}."
    yield ranks % expert, EXPERT, what, why, fix


def _rules_of_sequence(request: LayoutRequest, layout: Layout) -> Iterator[Rule]:
    key, what = "sequence_parallel", f"sequence_parallel is true, but {TENSOR} is 1."
    why = "Sequence parallelism cuts a sequence over the tensor-parallel ranks."
    yield layout.sequence_parallel and layout.tensor == 1, key, what, why, f"{key}: auto, or raise {TENSOR}"
    what = "MoE and tensor parallelism are enabled without also enabling sequence parallelism."
    why = "Each tensor rank would repeat the same tokens, and Megatron-Core stops in the first step."
    yield request.shape.experts and layout.tensor > 1 and not layout.sequence_parallel, key, what, why, f"{key}: auto"
    key, tokens, most = "sequence_length", request.data.sequence_length, request.shape.context_tokens
    yield tokens > most, key, f"{key} is {tokens}, but {request.shape.name} takes at most {most} tokens.", None, f"{key}: {most}"
    cut = layout.context * (2 if layout.context > 1 else 1) * (layout.tensor if layout.sequence_parallel else 1)
    reasons = [f"{2 * layout.context} pieces of context parallelism"] * (layout.context > 1)
    reasons += [f"{layout.tensor} ranks of sequence parallelism"] * layout.sequence_parallel
    fix = f"{key}: {max(cut, tokens // cut * cut)}, or another {CONTEXT if layout.context > 1 else TENSOR}"
    yield tokens % cut, key, f"{key} ({tokens}) must be a multiple of {cut}.", f"It is cut into {' and '.join(reasons)}.", fix


def _rules_of_batch(request: LayoutRequest, layout: Layout, micro: int) -> Iterator[Rule]:
    key, whole, unit = "global_batch_size", request.data.global_batch_size, micro * layout.data
    what = f"global batch size ({whole}) is not divisible by micro batch size ({micro}) times data parallel size ({layout.data})."
    why = "Every replica runs the same number of whole micro-batches in a step."
    fix = f"{key}: {max(1, round(whole / unit)) * unit}"
    if whole % unit and whole % layout.data == 0:
        fix += f", or micro_batch_size: {max(size for size in range(1, micro) if whole // layout.data % size == 0)}"
    yield whole % unit, key, what, why, fix
    key, stated, steps = "gradient_accumulation_steps", request.layout.gradient_accumulation_steps, whole // unit
    why = f"{whole} sequences / (micro_batch_size {micro} x DP {layout.data})."
    fix = f"leave {key} out: it follows from the batch"
    yield stated not in {None, steps}, key, f"{key} is {stated}, but the batch gives {steps}.", why, fix
    what = f"The {steps} micro-batches of a step must be a multiple of {PIPELINE} ({layout.pipeline})."
    why = "The interleaved schedule runs micro-batches in rounds of one per stage."
    fix = f"another global_batch_size or micro_batch_size, or leave {VIRTUAL} out"
    yield layout.virtual_pipeline is not None and steps % layout.pipeline, VIRTUAL, what, why, fix
