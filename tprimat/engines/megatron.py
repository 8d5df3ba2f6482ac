"""The embedded engine: Megatron-Core under a Lightning Trainer, on a CPU, CUDA or ROCm."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from tprimat.core.errors import ConfigError, UserError
from tprimat.core.flops import attention_matrices, feed_forward_matrices, moe_matrices
from tprimat.core.implementations import EMBEDDED, TRANSFORMER_ENGINE, Implementation, Optimizer, Options, Version
from tprimat.core.models import ModelShape
from tprimat.core.workload import graph_obstacle
from tprimat.engines.base import Here, Where, WorkerEngine, beyond_limits, fused_loss
from tprimat.plan.graphs import FEWEST_STEPS, launches_graphs, measured_gain
from tprimat.plan.schema import RunPlan
from tprimat.records.evidence import STEPS_WITHOUT_GRAPHS

FP8_MULTIPLE = 16
"""cuBLASLt and hipBLASLt require it of every dimension of an fp8 product."""

NO_GAIN = "no record shows a gain here"


class EmbeddedEngine(WorkerEngine):
    """Runs everywhere; its packages are checked when a run starts, so that plans can be made without them."""

    name: ClassVar[str] = "megatron"
    trainer: ClassVar[str | None] = "tprimat.megatron"
    lacks: ClassVar[frozenset[str]] = frozenset({"blocks"})
    known: ClassVar[str | None] = "megatron-core"
    """A newer one may do something else under the same names."""

    def available(self, here: Here) -> str | UserError:
        """Always: a plan needs no package."""
        return "always there"

    def refusal(self, plan: RunPlan, where: Where) -> UserError | None:
        """Refuse before the start what the worker would refuse."""
        if limit := next(beyond_limits(self, plan), None):
            return limit
        work, place = plan.workload, where("platform_optimizations", plan.platform, "precision")
        if work.matmul_dtype == "fp8" and work.shape.experts and plan.engine_options.layers == "local":
            what = f"The embedded engine's own layers train {work.shape.name}, which has experts, in bf16 only."
            fix = "--precision bf16, or layers: transformer_engine"
            return ConfigError(what, where=place, why="fp8 gained nothing there.", fix=fix)
        return self.refusal_of_layout(plan, where, EMBEDDED)

    def refusal_of_layout(self, plan: RunPlan, where: Where, code: Implementation) -> UserError | None:
        """All but experts in fp8, which other engines train: their layouts can be planned."""
        return next(chain(_refusals_of_layout(plan, where), _refusals_of_switches(plan, where)), None)

    def options(self, plan: RunPlan) -> dict[str, Any]:
        """Return the switches; CUDA graphs as they are decided before the start."""
        return {**super().options(plan), "cuda_graphs": launches_graphs(plan)}

    def remark(self, plan: RunPlan) -> str | None:
        """Say that CUDA graphs run, why, and what recording them costs; or that GPUs will wait for the host, which graphs end."""
        if not launches_graphs(plan):
            return _late_host(plan)
        row = measured_gain(plan)
        gain = f"a record shows {row.gain:.3f} x ({row.name} in data/cuda_graphs.yaml)" if row else NO_GAIN
        seconds = f"about {row.recording_seconds:g} s" if row else "about a second"
        return f"CUDA graphs: on, {gain}; recording makes step {STEPS_WITHOUT_GRAPHS} {seconds} longer"

    def implementation(self, shape: ModelShape, options: Options, transformer_engine: Version = None) -> Implementation | None:
        """Read the switches; auto means what a GPU has."""
        on = {name: value is not False for name, value in options.items()}
        in_fp32 = options.get("gradients", "fp32") == "fp32"
        if options.get("layers") == "transformer_engine":
            # Its Adam updates fp32 states alone, and the switch is torch's.
            by_torch = options.get("optimizer_states") == "bf16"
            return replace(
                TRANSFORMER_ENGINE,
                loss=fused_loss(transformer_engine),
                optimizer=_optimizer(fused=on.get("fused_adam", True) or not by_torch, compiled=False),
                balanced_stages=on.get("balanced_stages", True),
                reduces_in_fp32=in_fp32,
            )
        compiled = on.get("compiled_regions", True)
        sharded = options.get("fully_shard") is True
        accumulates = on.get("accumulate_weight_gradients", True) and not sharded
        return replace(
            EMBEDDED,
            loss="chunked" if on.get("streamed_cross_entropy", True) else "compiled",
            eager_loss=not compiled,
            eager_layers=not compiled,
            optimizer=_optimizer(fused=on.get("fused_adam", True), compiled=on.get("compiled_adam", True)),
            keeps_joint_projection=not compiled,
            widens_gradients=not on.get("compiled_adam", True),
            accumulates_weight_gradients=accumulates,
            zeroes_gradients=not accumulates,
            shards_weights=sharded,
            divides_over_replicas_alone=sharded,
            balanced_stages=on.get("balanced_stages", True),
            reduces_in_fp32=in_fp32,
            overlaps_tensor_parallel=on.get("overlap_tensor_parallel", True),
            fp8_output_layer=options.get("fp8_output_layer") is True,
            launches_own_layers=options.get("cuda_graphs") is not True,
        )


def _late_host(plan: RunPlan) -> str | None:
    late, step = (of.time.get("host", 0.0), of.step_seconds or 0.0) if (of := plan.prediction) else (0.0, 0.0)
    if late <= 0.1 * step or plan.engine_options.cuda_graphs != "auto" or any(why[0] for why in _of_cuda_graphs(plan)):
        return None
    way = "--set platform_optimizations.nvidia.engine_options.cuda_graphs=true"
    return f"CUDA graphs: off, {NO_GAIN}; by prediction GPUs wait for the host {late:.1f} of {step:.1f} s a step: {way}"


def _optimizer(*, fused: bool, compiled: bool) -> Optimizer:
    return "one_pass" if compiled else "fused" if fused else "eager"


def _refusals_of_layout(plan: RunPlan, where: Where) -> Iterator[ConfigError]:
    work, shape, layout, options = plan.workload, plan.workload.shape, plan.workload.layout, plan.engine_options
    own_layers, in_fp8 = options.layers == "local", plan.workload.matmul_dtype == "fp8"
    platform = partial(where, "platform_optimizations", plan.platform)
    split = partial(where, "parallelism", plan.strategy, plan.model, plan.platform)
    if shape.experts and (not shape.gated or shape.linear_bias):
        what, place = f"The embedded engine's experts are gated and have no biases; {shape.name} differs.", "architecture"
        yield ConfigError(what, where=where("models", plan.model, place), fix="gated: true and linear_bias: false")
    if shape.experts and not own_layers and layout.tensor > 1 and layout.expert == 1:
        what = "Transformer Engine's experts under tensor parallelism need expert parallelism."
        why = "Megatron-Core would not add up the gradients of whole experts over tensor-parallel ranks."
        fix = f"expert_model_parallel_size: {layout.tensor}, or layers: local"
        yield ConfigError(what, where=split("expert_model_parallel_size"), why=why, fix=fix)
    if layout.tensor > 1 and not layout.sequence_parallel and shape.kv_lora_rank:
        what = f"{shape.name} has latent attention, which needs sequence parallelism under tensor parallelism."
        why = "Otherwise each tensor rank would repeat the same tokens."
        yield ConfigError(what, where=split("sequence_parallel"), why=why, fix="sequence_parallel: auto")
    for name, size in _fp8_dimensions(plan) if in_fp8 else ():
        if size % FP8_MULTIPLE:
            what, why = f"{name} of {size} cannot be multiplied in fp8.", f"Matrix units take multiples of {FP8_MULTIPLE} only."
            fix = "--precision bf16, or another layout or micro-batch"
            yield ConfigError(what, where=platform("precision"), why=why, fix=fix)
    if own_layers and in_fp8 and "layernorm" in (work.recompute_modules or ()):
        what = "The embedded engine's own layers cannot recompute layernorm in fp8."
        why, fix = (
            "Products in 8 bits need the norm's output with its rows' maxima.",
            "recompute_modules: [mlp], or recompute: full",
        )
        yield ConfigError(what, where=platform("recompute_modules"), why=why, fix=fix)
    if not own_layers and plan.platform != "nvidia":
        place = platform("engine_options", "layers")
        yield ConfigError("layers is transformer_engine.", where=place, why="It needs an NVIDIA GPU.", fix="layers: local")


def _refusals_of_switches(plan: RunPlan, where: Where) -> Iterator[ConfigError]:
    options, ranks = plan.engine_options, plan.workload.layout.world_size
    switch = partial(where, "platform_optimizations", plan.platform, "engine_options")
    for name in ("gradients", "optimizer_states") if plan.workload.matmul_dtype == "fp32" else ():
        if getattr(options, name) == "bf16":
            why = "The weights are fp32, so their gradients and states are too."
            yield ConfigError(f"{name} is bf16.", where=switch(name), why=why, fix=f"{name}: fp32, or --precision bf16")
    if options.optimizer_states == "bf16" and ranks > 1:
        place, why = switch("optimizer_states"), f"It works on one rank only; this layout has {ranks}, which share fp32 states."
        yield ConfigError("optimizer_states is bf16.", where=place, why=why, fix="optimizer_states: fp32, or --gpus 1")
    for name, contradictions in SWITCHES.items():
        for applies, what, why, fix in contradictions(plan) if getattr(options, name) is True else ():
            if applies:
                yield ConfigError(f"{name} is on, but {what}.", where=switch(name), why=why, fix=f"{fix}, or {name}: false")


Contradiction = tuple[bool, str, str, str]
"""Whether it is there, and in words what, why it contradicts a switch that is on, and the way out."""


def _of_fully_shard(plan: RunPlan) -> Iterator[Contradiction]:
    options, layout, shape = plan.engine_options, plan.workload.layout, plan.workload.shape
    whole = "It only splits dense models over replicas."
    yield layout.tensor > 1, "the layout has tensor parallelism", whole, "a --parallel with TP1"
    yield layout.pipeline > 1, "the layout has pipeline parallelism", whole, "a --parallel with PP1"
    yield shape.experts is not None, f"{shape.name} has experts", whole, "a dense model"
    yield plan.workload.matmul_dtype == "fp8", "the precision is fp8", "Weights are gathered in bf16.", "--precision bf16"
    yield options.layers != "local", "layers is transformer_engine", "It only splits our own layers.", "layers: local"
    for name in ("gradients", "optimizer_states"):
        yield getattr(options, name) == "bf16", f"{name} is bf16", "Its shards are fp32.", f"{name}: fp32"
    name, why = "accumulate_weight_gradients", "It keeps no whole-weight gradient to add to."
    yield getattr(options, name) is True, f"{name} is on", why, f"{name}: auto"
    name, off = "distributed_optimizer", not options.distributed_optimizer
    yield off, f"{name} is off", "It always does that.", f"{name}: true"


def _of_cuda_graphs(plan: RunPlan) -> Iterator[Contradiction]:
    """Passes in which Python decides something anew, and some that no GPU has recorded."""
    work, untested = plan.workload, "It is untested."
    why_not = graph_obstacle(work, fully_shard=plan.engine_options.fully_shard, own_layers=plan.engine_options.layers == "local")
    yield plan.platform != "nvidia", f"the platform is {plan.platform}", "It needs an NVIDIA GPU.", "--platform nvidia"
    yield why_not == "virtual", "the layout has virtual pipelining", untested, "a --parallel without VPP"
    what = "Transformer Engine's layers run in pipeline stages"
    yield why_not == "pipeline", what, untested, "layers: local, or a --parallel with PP1"
    yield why_not == "context", "the layout has context parallelism", untested, "a --parallel with CP1"
    why = "The host must read how many tokens each expert got."
    yield why_not == "experts", f"{work.shape.name} has experts", why, "a dense model"
    why = "Megatron-Core saves random states on the host for it."
    yield why_not == "recompute", f"recompute is {work.recompute}", why, "recompute: none"
    yield why_not == "fully_shard", "fully_shard is on", untested, "fully_shard: false"
    yield why_not == "fp8", "Transformer Engine multiplies in fp8", untested, "layers: local, or --precision bf16"
    why = f"The first {STEPS_WITHOUT_GRAPHS} run without graphs, and one more is warm-up."
    yield plan.steps < FEWEST_STEPS, f"there are {plan.steps} steps", why, f"--steps {FEWEST_STEPS}"


SWITCHES: Mapping[str, Callable[[RunPlan], Iterator[Contradiction]]] = {
    "fully_shard": _of_fully_shard,
    "cuda_graphs": _of_cuda_graphs,
}


def _fp8_dimensions(plan: RunPlan) -> Iterator[tuple[str, int]]:
    """Name and size of every dimension of the products on one rank. Experts are whole, and take any number of tokens."""
    work, shape, tensor = plan.workload, plan.workload.shape, plan.workload.layout.tensor
    dense = feed_forward_matrices(shape) if shape.dense_layers else []
    for matrix in [*attention_matrices(shape), *dense, *moe_matrices(shape)]:
        for side, size in (("inputs", matrix.inputs), ("outputs", matrix.outputs)):
            if matrix.name != "router":
                yield f"{matrix.name}: a dimension", size // (tensor if matrix.split == side and matrix.copies == 1 else 1)
    tokens = work.micro_batch * work.sequence_tokens // work.layout.context
    yield "A micro-batch", tokens
    if shape.kv_lora_rank:  # whose narrow projections each tensor rank multiplies with its own tokens
        yield "A tensor rank's part of a micro-batch", tokens // tensor


ENGINE = EmbeddedEngine()
