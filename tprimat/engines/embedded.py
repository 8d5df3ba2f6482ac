"""The embedded engine: Megatron-Core under a Lightning Trainer, on a CPU, CUDA or ROCm."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from typing import ClassVar

from tprimat.core.cuda_graphs import Obstacle, obstacle
from tprimat.core.errors import ConfigError, LaunchError, UserError
from tprimat.core.flops import attention_matrices, feed_forward_matrices, moe_matrices
from tprimat.core.implementations import EMBEDDED, TRANSFORMER_ENGINE, Implementation, Optimizer
from tprimat.core.models import padded_vocabulary
from tprimat.engines.base import Availability, Here, Settings, Where, WorkerEngine
from tprimat.plan.schema import RunPlan
from tprimat.records.evidence import STEPS_WITHOUT_GRAPHS

KNOWN_CORES = ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""Versions of Megatron-Core that train to the same losses."""
CORE = "megatron-core"
FP8_MULTIPLE = 16
"""cuBLASLt and hipBLASLt require it of every dimension of an fp8 product."""


class EmbeddedEngine(WorkerEngine):
    """Runs everywhere; its packages are checked when a run starts, so that plans can be made without them."""

    name: ClassVar[str] = "megatron"
    trainer: ClassVar[str | None] = "tprimat.megatron"

    def available(self, here: Here) -> Availability:
        """Always: a plan needs no package."""
        return Availability(reason="always there")

    def refusal(self, plan: RunPlan, where: Where) -> UserError | None:
        """Refuse before the start what the worker would refuse."""
        return _refuse_experts_in_fp8(plan, where) or self._refusal_of_split(plan, where)

    def _refusal_of_split(self, plan: RunPlan, where: Where) -> UserError | None:
        return (
            _refuse_experts(plan, where)
            or _refuse_repeated_tokens(plan, where)
            or _refuse_fp8(plan, where)
            or _refuse_fp8_output_layer(plan, where)
            or _refuse_recomputation(plan, where)
            or _refuse_bf16_gradients(plan, where)
            or _refuse_bf16_states(plan, where)
            or _refuse_fully_shard(plan, where)
            or _refuse_transformer_engine(plan, where)
            or _refuse_cuda_graphs(plan, where)
        )

    def untried(self) -> UserError | None:
        """Refuse a Megatron-Core newer than all known ones: its parts may do something else under the same names."""
        try:
            installed = metadata.version(CORE)
        except metadata.PackageNotFoundError:
            return None
        *others, newest = KNOWN_CORES
        if _release(installed) <= _release(newest):
            return None
        why = f"This engine is known to train with {', '.join(others)} and {newest}."
        return LaunchError(
            f"{CORE} {installed} is too new.", why=why, fix=f"pip install {CORE}=={newest}; --force starts it anyway"
        )

    def refusal_of_layout(self, plan: RunPlan, where: Where, code: Implementation) -> UserError | None:
        """All but experts in fp8, which other engines train: their layouts can be planned."""
        return self._refusal_of_split(plan, where)

    def implementation(self, settings: Settings) -> Implementation | None:
        """Read the switches; auto means what a GPU has."""
        on = {name: value is not False for name, value in settings.options.items()}
        in_fp32 = settings.options.get("gradients", "fp32") == "fp32"
        graphs = settings.options.get("cuda_graphs") is True
        if settings.options.get("layers") == "transformer_engine":
            # Its Adam updates fp32 states alone, and the switch is torch's.
            by_torch = settings.options.get("optimizer_states") == "bf16"
            return replace(
                TRANSFORMER_ENGINE,
                loss="in_place",
                optimizer=_optimizer(fused=on.get("fused_adam", True) or not by_torch, compiled=False),
                balanced_stages=on.get("balanced_stages", True),
                reduces_in_fp32=in_fp32,
                late_host_seconds=0.0 if graphs else TRANSFORMER_ENGINE.late_host_seconds,
            )
        compiled = on.get("compiled_regions", True)
        sharded = settings.options.get("fully_shard") is True
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
            fp8_output_layer=settings.options.get("fp8_output_layer") is True,
            late_host_seconds=0.0 if graphs else EMBEDDED.late_host_seconds,
        )


def _release(version: str) -> tuple[int, ...]:
    """Return the major and the minor number of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


def _optimizer(*, fused: bool, compiled: bool) -> Optimizer:
    return "one_pass" if compiled else "fused" if fused else "eager"


def _refuse_experts(plan: RunPlan, where: Where) -> ConfigError | None:
    """Refuse what the engine's experts cannot do."""
    if not plan.workload.shape.experts:
        return None
    architecture = where("models", plan.model, "architecture")
    if not plan.workload.shape.gated or plan.workload.shape.linear_bias:
        what = f"The embedded engine's experts are gated and have no biases; {plan.workload.shape.name} differs."
        return ConfigError(what, where=architecture, fix="gated: true and linear_bias: false")
    if plan.engine_options.layers != "local" and plan.workload.layout.tensor > 1 and plan.workload.layout.expert == 1:
        place = where("parallelism", plan.strategy, plan.model, plan.platform, "expert_model_parallel_size")
        why = "Megatron-Core would not add up the gradients of whole experts over tensor-parallel ranks."
        what = "Transformer Engine's experts under tensor parallelism need expert parallelism."
        return ConfigError(
            what, where=place, why=why, fix=f"expert_model_parallel_size: {plan.workload.layout.tensor}, or layers: local"
        )
    return None


def _refuse_repeated_tokens(plan: RunPlan, where: Where) -> ConfigError | None:
    """Refuse the same tokens on several tensor ranks, where latent attention needs each rank's own; plan/layout.py: experts."""
    if plan.workload.layout.tensor == 1 or plan.workload.layout.sequence_parallel or not plan.workload.shape.kv_lora_rank:
        return None
    return ConfigError(
        f"{plan.workload.shape.name} has latent attention, which needs sequence parallelism under tensor parallelism.",
        where=where("parallelism", plan.strategy, plan.model, plan.platform, "sequence_parallel"),
        why="Otherwise each tensor rank would compute the same tokens once more.",
        fix="sequence_parallel: auto",
    )


def _refuse_experts_in_fp8(plan: RunPlan, where: Where) -> ConfigError | None:
    if plan.workload.matmul_dtype != "fp8" or not plan.workload.shape.experts or plan.engine_options.layers != "local":
        return None
    what = f"The embedded engine's own layers train {plan.workload.shape.name}, which has experts, in bf16 alone."
    place, fix = where("platform_optimizations", plan.platform, "precision"), "--precision bf16, or layers: transformer_engine"
    return ConfigError(what, where=place, why="fp8 gained nothing there.", fix=fix)


def _refuse_fp8(plan: RunPlan, where: Where) -> ConfigError | None:
    if plan.workload.matmul_dtype != "fp8":
        return None
    for what, size in _fp8_dimensions(plan):
        if size % FP8_MULTIPLE:
            return ConfigError(
                f"{what} of {size} cannot be multiplied in fp8.",
                where=where("platform_optimizations", plan.platform, "precision"),
                why=f"The matrix units take fp8 in multiples of {FP8_MULTIPLE} only.",
                fix="--precision bf16, or another layout or micro-batch",
            )
    return None


Contradiction = tuple[bool, str, str, str]
"""Whether it is there, and in words what, why it contradicts, and the way out."""


def _refuse_switch(name: str, plan: RunPlan, where: Where, contradictions: Sequence[Contradiction]) -> ConfigError | None:
    """Refuse a switch that is on for the first thing that contradicts it."""
    for applies, what, why, fix in contradictions:
        if applies:
            place = where("platform_optimizations", plan.platform, "engine_options", name)
            return ConfigError(f"{name} is on, and {what}.", where=place, why=why, fix=f"{fix}, or {name}: false")
    return None


def _refuse_fp8_output_layer(plan: RunPlan, where: Where) -> ConfigError | None:
    """Refuse an output layer in 8 bits where it is not ours, whole logits exist, or nothing else is in 8 bits."""
    options, in_fp8 = plan.engine_options, plan.workload.matmul_dtype == "fp8"
    if not options.fp8_output_layer:
        return None
    whole = options.streamed_cross_entropy is False
    contradictions = [
        (
            not in_fp8,
            f"the precision is {plan.workload.matmul_dtype}",
            "Only fp8 runs have products in 8 bits.",
            "--precision fp8",
        ),
        (options.layers != "local", "layers is transformer_engine", "The output layer is then Megatron-Core's.", "layers: local"),
        (whole, "streamed_cross_entropy is off", "Its gradient is converted chunk by chunk.", "streamed_cross_entropy: auto"),
    ]
    return _refuse_switch("fp8_output_layer", plan, where, contradictions)


def _fp8_dimensions(plan: RunPlan) -> Iterator[tuple[str, int]]:
    """Name and size of every dimension of the products on one rank. Experts are whole, and take any number of tokens."""
    shape, tensor = plan.workload.shape, plan.workload.layout.tensor
    dense = feed_forward_matrices(shape) if shape.dense_layers else []
    for matrix in [*attention_matrices(shape), *dense, *moe_matrices(shape)]:
        for side, size in (("inputs", matrix.inputs), ("outputs", matrix.outputs)):
            if matrix.name != "router":
                yield f"{matrix.name}: a dimension", size // (tensor if matrix.split == side and matrix.copies == 1 else 1)
    if plan.engine_options.fp8_output_layer:
        yield "output layer: a dimension", padded_vocabulary(shape) // tensor
    if plan.workload.micro_batch_sequences is not None:
        tokens = plan.workload.micro_batch_sequences * plan.workload.sequence_tokens // plan.workload.layout.context
        yield "A micro-batch", tokens
        if shape.kv_lora_rank:  # whose narrow projections each tensor rank multiplies with its own tokens
            yield "A tensor rank's part of a micro-batch", tokens // tensor


def _refuse_recomputation(plan: RunPlan, where: Where) -> ConfigError | None:
    """Refuse to recompute norms apart from the products that need more of them than their output."""
    if (
        plan.engine_options.layers != "local"
        or plan.workload.matmul_dtype != "fp8"
        or "layernorm" not in (plan.workload.recompute_modules or ())
    ):
        return None
    what = "The embedded engine's own layers cannot recompute layernorm in fp8."
    place = where("platform_optimizations", plan.platform, "recompute_modules")
    why = "Products in 8 bits need the norm's output together with its rows' maxima."
    return ConfigError(what, where=place, why=why, fix="recompute_modules: [mlp], or recompute: full")


def _refuse_bf16_gradients(plan: RunPlan, where: Where) -> ConfigError | None:
    """Refuse bf16 gradients of fp32 weights."""
    if plan.engine_options.gradients == "fp32" or plan.workload.matmul_dtype != "fp32":
        return None
    place = where("platform_optimizations", plan.platform, "engine_options", "gradients")
    why = "The weights are fp32, and their gradients with them."
    return ConfigError("gradients is bf16.", where=place, why=why, fix="gradients: fp32, or --precision bf16")


def _refuse_bf16_states(plan: RunPlan, where: Where) -> ConfigError | None:
    """Refuse bf16 optimizer states on several ranks, which share fp32 states, and under fp32 weights."""
    if plan.engine_options.optimizer_states == "fp32":
        return None
    place = where("platform_optimizations", plan.platform, "engine_options", "optimizer_states")
    what, fix = "optimizer_states is bf16.", "optimizer_states: fp32"
    if (ranks := plan.workload.layout.world_size) > 1:
        why = f"It is for one rank alone; this layout has {ranks}, which share fp32 states."
        return ConfigError(what, where=place, why=why, fix=f"{fix}, or --gpus 1 with a layout for it")
    if plan.workload.matmul_dtype == "fp32":
        return ConfigError(what, where=place, why="The weights are fp32, and their states with them.", fix=fix)
    return None


def _refuse_fully_shard(plan: RunPlan, where: Where) -> ConfigError | None:
    """Refuse to split over the replicas what is split otherwise, and switches whose work fully_shard does in its own way."""
    options, layout = plan.engine_options, plan.workload.layout
    if not options.fully_shard:
        return None
    whole = "It splits dense models over replicas alone."
    contradictions = [
        (layout.tensor > 1, "the layout has tensor parallelism", whole, "a --parallel with TP1"),
        (layout.pipeline > 1, "the layout has pipeline parallelism", whole, "a --parallel with PP1"),
        (plan.workload.shape.experts is not None, f"{plan.workload.shape.name} has experts", whole, "a dense model"),
        (plan.workload.matmul_dtype == "fp8", "the precision is fp8", "Weights are gathered in bf16.", "--precision bf16"),
        (options.layers != "local", "layers is transformer_engine", "It splits our own layers.", "layers: local"),
        *(
            (getattr(options, name) == "bf16", f"{name} is bf16", "Its shards are fp32.", f"{name}: fp32")
            for name in ("gradients", "optimizer_states")
        ),
        (
            options.accumulate_weight_gradients is True,
            "accumulate_weight_gradients is on",
            "It keeps no gradient of a whole weight to add to.",
            "accumulate_weight_gradients: auto",
        ),
        (
            not options.distributed_optimizer,
            "distributed_optimizer is off",
            "It always does that.",
            "distributed_optimizer: true",
        ),
    ]
    return _refuse_switch("fully_shard", plan, where, contradictions)


def _refuse_transformer_engine(plan: RunPlan, where: Where) -> ConfigError | None:
    """Refuse NVIDIA's layers on other hardware, and switches that are a part of our own layers."""
    options = plan.engine_options
    if options.layers == "local":
        return None

    def place(name: str) -> str:
        return where("platform_optimizations", plan.platform, "engine_options", name)

    what = "layers is transformer_engine"
    if plan.platform != "nvidia":
        return ConfigError(f"{what}.", where=place("layers"), why="It needs an NVIDIA GPU.", fix="layers: local")
    for name in ("compiled_regions", "overlap_tensor_parallel"):
        if getattr(options, name) is True:
            why = f"{name} is a part of our own layers."
            return ConfigError(f"{what}, and {name} is on.", where=place(name), why=why, fix=f"{name}: auto, or layers: local")
    return None


def _refuse_cuda_graphs(plan: RunPlan, where: Where) -> ConfigError | None:
    """Refuse to record passes in which Python decides something anew, and some that no GPU has recorded."""
    options = plan.engine_options
    if not options.cuda_graphs:
        return None
    untested, fewest = "It is untested.", STEPS_WITHOUT_GRAPHS + 2
    why_not = obstacle(plan.workload, fully_shard=options.fully_shard, own_layers=options.layers == "local")
    in_words: dict[Obstacle, tuple[str, str, str]] = {
        "pipeline": (
            "the layout has pipeline parallelism",
            "Stages exchange activations between passes, which is not recorded.",
            "a --parallel with PP1",
        ),
        "context": ("the layout has context parallelism", untested, "a --parallel with CP1"),
        "experts": (
            f"{plan.workload.shape.name} has experts",
            "The host must read how many tokens each expert got.",
            "a dense model",
        ),
        "recompute": (
            f"recompute is {plan.workload.recompute}",
            "Megatron-Core saves random states on the host for it.",
            "recompute: none",
        ),
        "fully_shard": ("fully_shard is on", untested, "fully_shard: false"),
        "fp8": ("Transformer Engine multiplies in fp8", untested, "layers: local, or --precision bf16"),
    }
    contradictions = [
        (plan.platform != "nvidia", f"the platform is {plan.platform}", "It needs an NVIDIA GPU.", "--platform nvidia"),
        (plan.nodes > 1, f"there are {plan.nodes} nodes", untested, "--nodes 1"),
        *([(True, *in_words[why_not])] if why_not else []),
        (plan.profiling.enabled, "profiling is on", "Recorded passes have no names in a trace.", "profiling off"),
        (
            plan.steps < fewest,
            f"there are {plan.steps} steps",
            f"The first {STEPS_WITHOUT_GRAPHS} run without graphs, and one more is warm-up.",
            f"--steps {fewest}",
        ),
    ]
    return _refuse_switch("cuda_graphs", plan, where, contradictions)


ENGINE = EmbeddedEngine()
