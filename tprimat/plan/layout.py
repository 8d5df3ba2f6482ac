"""Divide a model and a batch over ranks, and check every rule of Megatron-Core before anything starts.

The rule for key/value heads is the strict one, whole heads on every rank. Megatron-Core 0.15 requires it; 0.16 would also
copy heads if the degree is a multiple of their number.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tprimat.config.schema import DataConfig, LayoutConfig
from tprimat.core.errors import LayoutError
from tprimat.core.models import ModelShape, divisors, split_counts, valid_tensor_degrees
from tprimat.core.rows import DATA, document
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
    ranks_follow: bool = False
    """There are as many ranks as the layout needs, as on a CPU."""
    where_layout: Callable[[str], str]
    """Key of LayoutConfig -> its place."""
    where_data: Callable[[str], str]
    """Key of DataConfig -> its place."""


Rule = tuple[object, str, dict[str, Any]]
"""True where it is broken; its name in data/layout_rules.yaml, and the facts of its texts."""


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
        _check(request, rules, layout=layout, micro=micro)
    return layout, micro


def _check(request: LayoutRequest, rules: Iterable[Rule], **known: Any) -> None:
    for broken, name, own in rules:
        if broken:
            of_request = {"shape": request.shape, "asked": request.layout, "data": request.data, "world": request.world_size}
            rule: Mapping[str, str] = document(DATA / "layout_rules.yaml")[name]
            words = {key: text.format(**of_request, **known, **own) for key, text in rule.items()}
            key = own.get("degree_at_fault") or words["key"]
            where = request.where_data if key in {"sequence_length", "global_batch_size"} else request.where_layout
            place, (flag, *named) = where(key), where(key).split()
            typed = f"--set {named[0]}=" if flag == "--set" else f"{flag} "  # --tp, --set ep or --set and a whole path
            fix = words["fix"].replace(f"{key}: ", typed) if place.startswith("--") else words["fix"]
            raise LayoutError(words["what"], where=place, why=words.get("why"), fix=fix)


def _any_of(degrees: list[int], key: str, request: LayoutRequest) -> str:
    """Name the degrees that can be chosen for a key; where it divides the ranks, those that fit them and the other degrees."""
    dividing = (TENSOR, PIPELINE, CONTEXT)
    others = math.prod(getattr(request.layout, other) for other in dividing if other != key)
    free = key not in dividing or request.ranks_follow
    fitting = [degree for degree in degrees if free or request.world_size % (degree * others) == 0]
    *most, last = map(str, fitting or degrees)
    return f"{key}: {', '.join(most)} or {last}" if most else f"{key}: {last}"


def _rules_of_model(request: LayoutRequest) -> Iterator[Rule]:
    """Yield what the heads, widths, layers and ranks must divide by."""
    shape, world, virtual = request.shape, request.world_size, request.layout.virtual_pipeline_model_parallel_size
    tensor, pipeline, context = (getattr(request.layout, degree) for degree in (TENSOR, PIPELINE, CONTEXT))
    fix = _any_of(valid_tensor_degrees(shape), TENSOR, request)
    for name, count in split_counts(shape).items():
        yield count % tensor, "split", {"name": name, "count": count, "fix": fix}
    yield shape.layers % pipeline, "stages", {"fix": _any_of(divisors(shape.layers), PIPELINE, request)}
    if virtual is not None:
        layers = shape.layers // pipeline
        yield pipeline == 1, "single stage", {}
        yield layers % virtual, "chunks", {"layers": layers, "fix": _any_of(divisors(layers), VIRTUAL, request)}
    parts = tensor * pipeline * context
    largest = max((TENSOR, PIPELINE, CONTEXT), key=lambda degree: getattr(request.layout, degree))
    yield world % parts, "ranks", {"degree_at_fault": largest, "parts": parts, "gpus": parts * max(1, world // parts)}


def _rules_of_ranks(request: LayoutRequest, layout: Layout) -> Iterator[Rule]:
    """Yield what is stated of replicas, and how experts are spread."""
    yield request.layout.data_parallel_size not in {None, layout.data}, "replicas", {}
    expert, experts, ranks = layout.expert, request.shape.experts or 0, layout.tensor * layout.context * layout.data
    if expert > 1:
        yield not experts, "no experts", {}
        fix = _any_of(divisors(math.gcd(experts, ranks)), EXPERT, request)
        yield experts % expert, "experts", {"experts": experts, "fix": fix}
        yield ranks % expert, "ranks of experts", {"size": expert * layout.pipeline, "ranks": ranks, "fix": fix}


def _rules_of_sequence(request: LayoutRequest, layout: Layout) -> Iterator[Rule]:
    tokens = request.data.sequence_length
    yield layout.sequence_parallel and layout.tensor == 1, "nothing to cut", {}
    yield request.shape.experts and layout.tensor > 1 and not layout.sequence_parallel, "experts alone", {}
    yield tokens > request.shape.context_tokens, "context", {}
    cut = layout.context * (2 if layout.context > 1 else 1) * (layout.tensor if layout.sequence_parallel else 1)
    reasons = [f"{2 * layout.context} pieces of context parallelism"] * (layout.context > 1)
    reasons += [f"{layout.tensor} ranks of sequence parallelism"] * layout.sequence_parallel
    degree, near = CONTEXT if layout.context > 1 else TENSOR, max(cut, tokens // cut * cut)
    yield tokens % cut, "pieces", {"cut": cut, "reasons": " and ".join(reasons), "near": near, "degree": degree}


def _rules_of_batch(request: LayoutRequest, layout: Layout, micro: int) -> Iterator[Rule]:
    whole, unit = request.data.global_batch_size, micro * layout.data
    fix = str(max(1, round(whole / unit)) * unit)
    if whole % unit and whole % layout.data == 0:
        fix += f", or micro_batch_size: {max(size for size in range(1, micro) if whole // layout.data % size == 0)}"
    yield whole % unit, "batch", {"fix": fix}
    stated, steps = request.layout.gradient_accumulation_steps, whole // unit
    yield stated not in {None, steps}, "accumulation", {"steps": steps}
    yield layout.virtual_pipeline is not None and steps % layout.pipeline, "rounds", {"steps": steps}
