"""Build a RunPlan from the configuration and the command line."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import lcm
from typing import TypeVar

from tprimat.config.load import LoadedConfig, absolute_path, full_shape
from tprimat.config.schema import LayoutConfig, ModelConfig, PlatformOptimizations, RecomputeModule, Size
from tprimat.core.accelerators import PlatformName
from tprimat.core.errors import ConfigError, MissingLayoutError
from tprimat.core.models import ModelShape, tiny
from tprimat.core.workload import FORMATS, FullWorkload, Layout
from tprimat.plan.layout import LayoutRequest, resolve
from tprimat.plan.schema import Chosen, RunPlan

K = TypeVar("K", bound=str)
V = TypeVar("V")

STANDARD_LIBRARY = "text:stdlib"
"""Real text on every machine with Python: the sources of the standard library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest(Chosen):
    """What a plan is built from, besides the configuration."""

    gpus_found: int | None = None
    """Accelerators on this node, or cores for its processes; None if there are none to count."""
    multiple: int = 1
    """Divides the number of processes on a CPU, unless that is configured."""


def build_plan(loaded: LoadedConfig, request: PlanRequest) -> RunPlan:
    """Derive and check everything that a worker needs to know, except what only the engine can refuse (engines/base.py)."""
    config, model = loaded.config, _named(loaded, loaded.config.models, request.model, ("model", ("models",)))
    shape = shape_at(loaded, request.model, request.size)
    nodes, gpus = count_ranks(loaded, request.platform, request.gpus_found)
    hardware = config.hardware.platforms[request.platform]
    if request.platform == "cpu" and hardware.gpus_per_node == "auto":
        asked = config.parallelism.get(request.strategy, {}).get(request.model, {}).get("cpu", LayoutConfig())
        # What the layout needs, and replicas up to the cores; a power of two, which divides batches.
        ranks = asked.tensor_model_parallel_size * asked.pipeline_model_parallel_size * asked.context_parallel_size
        ranks = lcm(ranks, asked.pipeline_model_parallel_size * asked.expert_model_parallel_size)
        needed = lcm(-(-ranks // nodes), request.multiple)
        most = min(gpus, hardware.gpus_per_node_when_absent)
        gpus = needed * 2 ** (max(1, most // needed).bit_length() - 1)
    layout, micro = layout_of(loaded, request, shape, nodes * gpus)
    settings = config.platform_optimizations.get(request.platform, PlatformOptimizations())
    _check_settings(loaded, request.platform, settings)
    return RunPlan(
        **{one.name: getattr(request, one.name) for one in fields(Chosen)},
        workload=_workload(loaded, request.platform, shape, layout, micro),
        nemo_recipe=model.nemo_recipe,
        primus_config=model.primus_config,
        nodes=nodes,
        gpus_per_node=gpus,
        steps=config.training.duration.max_steps,
        dataset=_dataset(config.training.data.dataset, request.platform, loaded),
        seed=config.experiment.seed,
        optimizer=config.training.optimizer,
        engine_options=settings.engine_options,
        nemo=settings.nemo,
        bridge=settings.bridge,
        profiling=config.profiling,
        environment=settings.environment,
    )


def _workload(loaded: LoadedConfig, platform: PlatformName, shape: ModelShape, layout: Layout, micro: int) -> FullWorkload:
    training = loaded.config.training
    settings = loaded.config.platform_optimizations.get(platform, PlatformOptimizations())
    dtype, scaling = FORMATS.get(settings.precision, ("fp32", None))
    options = settings.engine_options
    return FullWorkload(
        **layout.facts,
        shape=shape,
        micro_batch_sequences=micro,
        global_batch_sequences=training.data.global_batch_size,
        sequence_tokens=training.data.sequence_length,
        matmul_dtype=dtype,
        fp8_scaling=scaling,
        recompute=settings.recompute,
        recompute_modules=_recompute_modules(loaded, platform, settings, shape) or None,
        recompute_layers=_recompute_layers(loaded, platform, settings, shape, layout),
        routing=training.routing if shape.experts else None,
        expert_capacity=(training.moe_expert_capacity_factor or "unlimited") if shape.experts else None,
        expert_tensor_parallel=1 if shape.experts else None,
        weights_split_over=layout.data * layout.context if options.fully_shard else 1,
        distributed_optimizer=options.distributed_optimizer,
        optimizer_states=options.optimizer_states,
    )


def _check_settings(loaded: LoadedConfig, platform: PlatformName, settings: PlatformOptimizations) -> None:
    warmup, steps = loaded.config.benchmarking.warmup_steps, loaded.config.training.duration.max_steps
    if warmup != "auto" and warmup >= steps:
        what, why = f"warmup_steps is {warmup}, but max_steps is {steps}.", "No step would be left to measure."
        fix = f"--set warmup=auto, or --steps {warmup + 10}"
        raise ConfigError(what, where=loaded.where("benchmarking", "warmup_steps"), why=why, fix=fix)
    if settings.precision not in {"bf16", "fp32"} and platform == "cpu":
        where = loaded.where("platform_optimizations", platform, "precision")
        why = "No processor multiplies 8-bit floating point; Megatron-Core would silently run another type."
        raise ConfigError(f"{settings.precision} cannot run on a CPU.", where=where, why=why, fix="--precision bf16 or fp32")


NEEDED_BY_MODULES: Mapping[str, tuple[str, str]] = {
    "moe": ("experts", "experts"),
    "shared_experts": ("shared_experts", "shared experts"),
    "mla_up_proj": ("kv_lora_rank", "latent attention"),
}
"""Module to recompute -> field of a shape that has it, and in words."""


def _recompute_modules(
    loaded: LoadedConfig, platform: PlatformName, settings: PlatformOptimizations, shape: ModelShape
) -> tuple[RecomputeModule, ...]:
    """Return the modules that are computed again, sorted; refuse those that the model lacks, and any without `selective`."""
    asked = settings.recompute_modules
    where = loaded.where("platform_optimizations", platform, "recompute_modules")
    if settings.recompute != "selective":
        if asked is None:
            return ()
        what = f"recompute_modules is set, but recompute is {settings.recompute}."
        raise ConfigError(what, where=where, why="It applies only to recompute: selective.", fix="recompute: selective")
    for module in asked or ():
        field, words = NEEDED_BY_MODULES.get(module, ("layers", ""))
        if not getattr(shape, field):
            left = [name for name in asked or () if name != module] or ["core_attn"]
            fix = f"recompute_modules: [{', '.join(left)}]"
            raise ConfigError(f"recompute_modules has {module}, but {shape.name} has no {words}.", where=where, fix=fix)
    inside = {"shared_experts"} if "moe" in (asked or ()) else set()
    return tuple(sorted(set(asked or ("core_attn",)) - inside))


def _recompute_layers(
    loaded: LoadedConfig, platform: PlatformName, settings: PlatformOptimizations, shape: ModelShape, layout: Layout
) -> int | None:
    """Return how many layers of each chunk of a stage are computed again, None for all; refuse a number without `full`."""
    asked = settings.recompute_layers
    if asked is None:
        return None
    where = loaded.where("platform_optimizations", platform, "recompute_layers")
    if settings.recompute != "full":
        what = f"recompute_layers is set, but recompute is {settings.recompute}."
        raise ConfigError(what, where=where, why="It applies only to recompute: full.", fix="recompute: full")
    fewest = shape.layers // layout.chunks
    if asked >= fewest:
        fix = f"recompute_layers: 1 to {fewest - 1}, or null for all" if fewest > 1 else "recompute_layers: null"
        why = f"A stage or its chunk has {fewest} layers."
        raise ConfigError(f"recompute_layers is {asked}.", where=where, why=why, fix=fix)
    return asked


def shape_of(model: ModelConfig, size: Size) -> ModelShape:
    """Return the shape of a model in a size."""
    shape = full_shape(model)
    return tiny(shape) if size == "tiny" else shape


def shape_at(loaded: LoadedConfig, model: str, size: Size) -> ModelShape:
    """Return the shape of a configured model in a size; refuse one that is not known, or whose router Megatron-Core refuses."""
    try:
        shape = shape_of(loaded.config.models[model], size)
        if shape.not_trained is not None:
            why = f"No engine here trains {shape.not_trained}; python3 -m tprimat plan predicts it."
            raise ConfigError(f"{shape.name} cannot be trained.", why=why, fix="another model")
        # Megatron-Core refuses it, too. The shape of a log may have it: it did run.
        if shape.experts and shape.experts_per_token == 1 and shape.router_score == "softmax" and shape.router_normalized:
            what = f"Model {shape.name} has softmax scores, normalized over 1 expert for each token."
            why = "The weight would always be 1. Megatron-Core: Please use --moe-router-pre-softmax when topk is 1."
            raise ConfigError(what, why=why, fix="router_normalized: false")
        return shape
    except ConfigError as error:
        where = loaded.where("models", model, "architecture")
        raise ConfigError(error.what, where=where, why=error.why, fix=error.fix) from error


def count_ranks(loaded: LoadedConfig, platform: PlatformName, here: int | None) -> tuple[int, int]:
    """Return the number of nodes and of ranks on each; refuse more GPUs than this machine has."""
    hardware = _named(loaded, loaded.config.hardware.platforms, platform, ("platform", ("hardware", "platforms")))
    requested = hardware.gpus_per_node
    if requested == "auto":
        return hardware.nodes, here or hardware.gpus_per_node_when_absent
    if platform != "cpu" and here is not None and requested > here:
        where, fix = loaded.where("hardware", "platforms", platform, "gpus_per_node"), f"--gpus {here}, and --nodes N for more"
        raise ConfigError(f"{requested} GPUs are requested on a node that has {here}.", where=where, fix=fix)
    return hardware.nodes, requested


def layout_of(loaded: LoadedConfig, run: PlanRequest | RunPlan, shape: ModelShape, world_size: int) -> tuple[Layout, int]:
    """Resolve the layout of a run's strategy for its model on its platform, over `world_size` ranks, and its micro-batch."""
    model, platform, strategy = run.model, run.platform, run.strategy
    by_model = _named(loaded, loaded.config.parallelism, strategy, ("strategy", ("parallelism",)))
    if misspelled := [name for name in by_model if name not in loaded.config.models]:
        _named(loaded, loaded.config.models, misspelled[0], ("model", ("models",)), ("parallelism", strategy, misspelled[0]))
    layout = by_model.get(model, {}).get(platform)
    if layout is None:
        # Say what to add to the strategy, or which of its models or platforms to choose instead.
        degrees = "{tensor_model_parallel_size: ..., pipeline_model_parallel_size: ...}"
        where, missing, on = loaded.where("parallelism", strategy), f"{model}: {{{platform}: {degrees}}}", ""
        instead = [f"--model {other}" for other in by_model]
        if model in by_model:
            where, missing = loaded.where("parallelism", strategy, model), f"{platform}: {degrees}"
            instead, on = [f"--platform {other}" for other in by_model[model]], f" on {platform}"
        what = f"The strategy {strategy} has no layout for {model}{on}."
        raise MissingLayoutError(what, where=where, fix=", or ".join([f"add {missing}", *instead]))
    return resolve(
        LayoutRequest(
            shape=shape,
            layout=layout,
            data=loaded.config.training.data,
            world_size=world_size,
            ranks_follow=platform == "cpu" and loaded.config.hardware.platforms[platform].gpus_per_node == "auto",
            where_layout=lambda key: loaded.where("parallelism", strategy, model, platform, key),
            where_data=lambda key: loaded.where("training", "data", key),
        )
    )


def _dataset(requested: str, platform: PlatformName, loaded: LoadedConfig) -> str:
    where = loaded.where("training", "data", "dataset")
    if requested == "auto":
        return STANDARD_LIBRARY if platform == "cpu" else "mock"
    if requested in {"mock", STANDARD_LIBRARY}:
        return requested
    if requested.startswith("text:") and len(requested) > len("text:"):
        return f"text:{absolute_path(requested.removeprefix('text:'), where)}"
    why = "It must be mock, text:PATH or auto."
    raise ConfigError(f"dataset is {requested!r}.", where=where, why=why, fix="--set data=text:PATH")


def _named(
    loaded: LoadedConfig, table: Mapping[K, V], name: K, kind: tuple[str, tuple[str, ...]], place: tuple[str, ...] = ()
) -> V:
    """Look up an entry of a table; `kind` is the word for such an entry and the table's key path, `place` where it is named."""
    if name in table:
        return table[name]
    noun, path = kind
    close = difflib.get_close_matches(name, list(table), n=1)
    fix = close[0] if close else f"one of: {', '.join(table)}" if table else f"add {name}: ..."
    fix += ", or a name that tprimat models lists" if noun == "model" and table and not place else ""
    raise ConfigError(f"There is no {noun} {name!r} in {'.'.join(path)}.", where=loaded.where(*(place or path)), fix=fix)
