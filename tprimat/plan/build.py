"""Config and command line -> RunPlan."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from tprimat.config.load import LoadedConfig
from tprimat.config.schema import EngineName, LayoutConfig, ModelConfig, PlatformOptimizations, Size
from tprimat.errors import ConfigError, UserError
from tprimat.facts.flops import attention_matrices, feed_forward_matrices
from tprimat.facts.models import ModelShape, model_shape, tiny
from tprimat.facts.platforms import PlatformName
from tprimat.plan.layout import LayoutRequest, resolve
from tprimat.plan.schema import Batch, Layout, PrimusStart, RunPlan

K = TypeVar("K", bound=str)
V = TypeVar("V")

FP8_MULTIPLE = 16
"""cuBLASLt's and hipBLASLt's, for every dimension of an fp8 product."""
STANDARD_LIBRARY = "text:stdlib"
"""Real text that every machine with Python has: the sources of its standard library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the command line decides before there is a plan."""

    model: str
    strategy: str
    platform: PlatformName
    size: Size
    engine: EngineName
    engine_reason: str
    gpus_found: int | None
    """Accelerators on this node; None where none can be counted."""
    run_id: str
    run_directory: str
    output_directory: str
    primus: PrimusStart | None = None
    """For the engine primus."""
    command: tuple[str, ...] = ()
    """The user's command line, for the record."""


def build_plan(loaded: LoadedConfig, request: PlanRequest) -> RunPlan:
    """Everything that a worker needs to know, derived and checked.

    Raises:
        ConfigError: a name that the configuration does not have.
        LayoutError: the model, the batch and the ranks do not divide.
    """
    config = loaded.config
    model = _named(loaded, config.models, request.model, ("model", ("models",)))
    shape = shape_at(loaded, request.model, request.size)
    if request.engine == "megatron":
        _check_dense(loaded, request.model, shape)
    nodes, gpus = count_ranks(loaded, request.platform, request.gpus_found)
    layout, batch = layout_of(loaded, request, shape, nodes * gpus)
    optimizations = config.platform_optimizations.get(request.platform, PlatformOptimizations())
    _check_choices(loaded, request, shape, layout, batch)
    return RunPlan(
        run_id=request.run_id,
        model=request.model,
        shape=shape,
        size=request.size,
        nemo_recipe=model.nemo_recipe,
        primus_config=model.primus_config,
        primus=request.primus,
        strategy=request.strategy,
        engine=request.engine,
        engine_reason=request.engine_reason,
        platform=request.platform,
        nodes=nodes,
        gpus_per_node=gpus,
        layout=layout,
        batch=batch,
        micro_batch_memory_bytes=config.benchmarking.micro_batch_memory_bytes,
        steps=config.training.duration.max_steps,
        precision=optimizations.precision,
        recompute=optimizations.recompute,
        dataset=_dataset(config.training.data.dataset, request.platform, loaded),
        tokenizer=None if config.training.data.tokenizer is None else _absolute(config.training.data.tokenizer),
        seed=config.experiment.seed,
        optimizer=config.training.optimizer,
        engine_options=optimizations.engine_options,
        profiling=config.profiling,
        environment=optimizations.environment,
        run_directory=request.run_directory,
        command=request.command,
        output_directory=request.output_directory,
    )


def _check_dense(loaded: LoadedConfig, model: str, shape: ModelShape) -> None:
    """Refuse before the start what the embedded engine's worker would refuse."""
    if shape.experts or shape.kv_lora_rank:
        raise ConfigError(
            f"The embedded engine trains dense models only; {shape.name} has experts or latent attention.",
            where=loaded.where("models", model, "architecture"),
            fix="--engine nemo or --engine primus where it is installed, or a dense model",
        )


def _check_choices(loaded: LoadedConfig, request: PlanRequest, shape: ModelShape, layout: Layout, batch: Batch) -> None:
    """What an engine or a platform cannot do of what was chosen."""
    optimizations = loaded.config.platform_optimizations.get(request.platform, PlatformOptimizations())
    _check_warmup(loaded)
    if optimizations.precision == "fp8":
        _check_fp8(loaded, request, shape, layout, batch)
    if optimizations.engine_options.optimizer_states == "bf16":
        _check_lean(loaded, request, layout)
    if batch.micro_batch_sequences == "auto":
        _check_search(loaded, request, count_ranks(loaded, request.platform, request.gpus_found)[0])


def _check_warmup(loaded: LoadedConfig) -> None:
    """Refuse to train when no step of it would be measured."""
    warmup, steps = loaded.config.benchmarking.warmup_steps, loaded.config.training.duration.max_steps
    if warmup != "auto" and warmup >= steps:
        raise ConfigError(
            f"warmup_steps is {warmup}, and a run has {steps} step{'s' * (steps > 1)}.",
            where=loaded.where("benchmarking", "warmup_steps"),
            why="No step would be left to measure.",
            fix=f"--warmup auto, or --steps {warmup + 10}",
        )


def _check_lean(loaded: LoadedConfig, request: PlanRequest, layout: Layout) -> None:
    """bf16 optimizer states: where there is an optimizer that has them, and weights that need them."""
    where = loaded.where("platform_optimizations", request.platform, "engine_options", "optimizer_states")
    what, fix = "optimizer_states is bf16.", "optimizer_states: fp32"
    precision = loaded.config.platform_optimizations[request.platform].precision
    if layout.world_size > 1:
        why = f"It is for one rank alone; this layout has {layout.world_size}, which share fp32 states."
        raise ConfigError(what, where=where, why=why, fix=f"{fix}, or --gpus 1 with a layout for it")
    if request.engine != "megatron":
        raise ConfigError(what, where=where, why=f"The engine {request.engine} has none.", fix=f"{fix}, or --engine megatron")
    if precision == "fp32":
        raise ConfigError(what, where=where, why="The weights are fp32, and their states with them.", fix=fix)


def _check_fp8(loaded: LoadedConfig, request: PlanRequest, shape: ModelShape, layout: Layout, batch: Batch) -> None:
    """Refuse where 8-bit floating point would be asked for and something else would run."""
    where = loaded.where("platform_optimizations", request.platform, "precision")
    if request.platform == "cpu":
        why = "No processor multiplies 8-bit floating point; Megatron-Core would silently run another type."
        raise ConfigError("fp8 cannot run on a CPU.", where=where, why=why, fix="--precision bf16 or --precision fp32")
    if request.engine == "megatron":
        fix = "--precision bf16, or another layout or micro-batch"
        for what, size in _fp8_dimensions(shape, layout, batch):
            if size % FP8_MULTIPLE:
                why = f"The matrix units take fp8 in multiples of {FP8_MULTIPLE} only."
                raise ConfigError(f"{what} of {size} cannot be multiplied in fp8.", where=where, why=why, fix=fix)


def _fp8_dimensions(shape: ModelShape, layout: Layout, batch: Batch) -> Iterator[tuple[str, int]]:
    """Sizes that the products of a rank sum over, or line up."""
    for matrix in [*attention_matrices(shape), *feed_forward_matrices(shape)]:
        for side, size in (("inputs", matrix.inputs), ("outputs", matrix.outputs)):
            yield f"{matrix.name}: a dimension", size // (layout.tensor if matrix.split == side else 1)
    if isinstance(batch.micro_batch_sequences, int):
        yield "A micro-batch", batch.micro_batch_sequences * batch.sequence_tokens // layout.context


def _check_search(loaded: LoadedConfig, request: PlanRequest, nodes: int) -> None:
    """Refuse micro_batch_size: auto where nobody would find it. Primus's own settings refuse it too."""
    if request.engine == "nemo":
        why = "NeMo's recipes have no search for it."
        fix = "--engine megatron to find it, then --micro-batch-size with that number"
    elif nodes > 1 and request.engine == "megatron":
        why = "Each node would look for itself, and they might not agree."
        fix = "--nodes 1 to find it, then --micro-batch-size with that number"
    else:
        return
    where = loaded.where("training", "data", "micro_batch_size")
    raise ConfigError("micro_batch_size is auto.", where=where, why=why, fix=fix)


def new_run_id(model: str, strategy: str, now: datetime | None = None) -> str:
    """Sorts by time and tells what it is: 20261121-040501-123456-llama-balanced."""
    moment = datetime.now(timezone.utc) if now is None else now
    return f"{moment:%Y%m%d-%H%M%S-%f}-{model}-{strategy}"


def shape_of(model: ModelConfig, size: Size) -> ModelShape:
    """The shape that a size of a model has."""
    shape = model.architecture if isinstance(model.architecture, ModelShape) else model_shape(model.architecture)
    return tiny(shape) if size == "tiny" else shape


def shape_at(loaded: LoadedConfig, model: str, size: Size) -> ModelShape:
    """The same for a model of the configuration.

    Raises:
        ConfigError: no shape has that name.
    """
    try:
        return shape_of(loaded.config.models[model], size)
    except ConfigError as error:
        where = loaded.where("models", model, "architecture")
        raise ConfigError(error.what, where=where, why=error.why, fix=error.fix) from error


def count_ranks(loaded: LoadedConfig, platform: PlatformName, found: int | None) -> tuple[int, int]:
    """Nodes and ranks a node.

    Raises:
        ConfigError: more GPUs are asked for than there are, or the platform is not in the configuration.
    """
    hardware = _named(loaded, loaded.config.hardware.platforms, platform, ("platform", ("hardware", "platforms")))
    asked = hardware.gpus_per_node
    if asked == "auto":
        return hardware.nodes, found or hardware.gpus_per_node_when_absent
    if platform != "cpu" and found is not None and asked > found:
        where = loaded.where("hardware", "platforms", platform, "gpus_per_node")
        raise ConfigError(f"{asked} GPUs are asked for, and this machine has {found}.", where=where, fix=f"--gpus {found}")
    return hardware.nodes, asked


def layout_of(loaded: LoadedConfig, request: PlanRequest, shape: ModelShape, world_size: int) -> tuple[Layout, Batch]:
    """The strategy's layout for this model on this platform, over `world_size` ranks."""
    model, platform, strategy = request.model, request.platform, request.strategy
    by_model = _named(loaded, loaded.config.parallelism, strategy, ("strategy", ("parallelism",)))
    by_platform = _named(loaded, by_model, model, ("model", ("parallelism", strategy)))
    layout: LayoutConfig = _named(loaded, by_platform, platform, ("platform", ("parallelism", strategy, model)))
    return resolve(
        LayoutRequest(
            shape=shape,
            layout=layout,
            data=loaded.config.training.data,
            world_size=world_size,
            where_layout=lambda key: loaded.where("parallelism", strategy, model, platform, key),
            where_data=lambda key: loaded.where("training", "data", key),
        )
    )


def _absolute(path: str) -> str:
    """A worker may start in another folder than the user's."""
    return str(Path(path).expanduser().resolve())


def _dataset(asked: str, platform: PlatformName, loaded: LoadedConfig) -> str:
    if asked == "auto":
        return STANDARD_LIBRARY if platform == "cpu" else "mock"
    if asked in {"mock", STANDARD_LIBRARY}:
        return asked
    if asked.startswith("text:") and len(asked) > len("text:"):
        return "text:" + _absolute(asked.removeprefix("text:"))
    where = loaded.where("training", "data", "dataset")
    raise ConfigError(f"dataset is {asked!r}.", where=where, why="It must be mock, text:PATH or auto.", fix="--data text:PATH")


def _named(loaded: LoadedConfig, table: Mapping[K, V], name: K, kind: tuple[str, tuple[str, ...]]) -> V:
    """An entry of a table, given what such an entry is called and the key path of the table."""
    if name in table:
        return table[name]
    noun, path = kind
    where = loaded.where(*path)
    if not table:
        raise ConfigError(
            f"{'.'.join(path)} is empty.", where=where, why=f"A {noun} {name!r} is asked for.", fix=f"add {name}: ..."
        )
    raise ConfigError(f"There is no {noun} {name!r} in {'.'.join(path)}.", where=where, fix=_suggestion(name, table))


def _suggestion(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return close[0] if close else f"one of: {', '.join(names)}"


# What to try where a strategy needs more memory than there is.


def strategies_with_less_memory(loaded: LoadedConfig, plan: RunPlan) -> tuple[str, ...]:
    """The other strategies that are valid for this plan's model and ranks and hold a smaller part of the model on each rank.

    Only the model's split is looked at: the batch of a step is the same, and a micro-batch may not be larger.

    Returns:
        names, those that split the model least further first, in the configuration's order where they are alike.
    """
    found = []
    for name in loaded.config.parallelism:
        try:
            layout, batch = layout_of(loaded, _request(plan, name), plan.shape, plan.layout.world_size)
        except UserError:  # not for this model, platform or number of ranks
            continue
        if _model_ranks(layout) > _model_ranks(plan.layout) and not _larger(batch, plan.batch):
            found.append((_model_ranks(layout), name))
    return tuple(name for _, name in sorted(found, key=lambda pair: pair[0]))


def _request(plan: RunPlan, strategy: str) -> PlanRequest:
    return PlanRequest(
        model=plan.model,
        strategy=strategy,
        platform=plan.platform,
        size=plan.size,
        engine=plan.engine,
        engine_reason=plan.engine_reason,
        gpus_found=plan.gpus_per_node,
        run_id=plan.run_id,
        run_directory=plan.run_directory,
        output_directory=plan.output_directory,
    )


def _model_ranks(layout: Layout) -> int:
    """Ranks that one copy of the model is spread over."""
    return layout.tensor * layout.pipeline


def _larger(batch: Batch, other: Batch) -> bool:
    micro, most = batch.micro_batch_sequences, other.micro_batch_sequences
    return isinstance(micro, int) and isinstance(most, int) and micro > most
