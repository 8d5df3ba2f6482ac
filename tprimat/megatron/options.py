"""Resolve the engine's switches for this device: every `auto` becomes on or off."""

from dataclasses import dataclass

import torch

from tprimat.errors import LaunchError
from tprimat.megatron import wgrad
from tprimat.megatron.tp_overlap import can_overlap
from tprimat.plan.schema import RunPlan
from tprimat.train.startup import transformer_engine_is_usable


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedOptions:
    """The switches of EngineOptions without `auto`."""

    layers: str
    compiled_regions: bool
    streamed_cross_entropy: bool
    accumulate_weight_gradients: bool
    cudnn_attention: bool
    fused_adam: bool
    compiled_adam: bool
    distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    overlap_tensor_parallel: bool
    balanced_stages: bool
    optimizer_states: str


def resolve(plan: RunPlan, device: torch.device) -> ResolvedOptions:
    """Resolve each `auto`: on where a GPU supports it, off on a CPU.

    Raises:
        LaunchError: an option is on and impossible here.
    """
    options, precision = plan.engine_options, plan.precision
    on_gpu = device.type == "cuda"
    ours = options.layers == "local"
    if not ours:
        _check_transformer_engine(plan, on_gpu)

    def on(requested: bool | str, default: bool) -> bool:
        return default if isinstance(requested, str) else requested

    compiles = on(options.compiled_regions, on_gpu and ours)
    can_accumulate = on_gpu and precision in {"bf16", "fp8"} and wgrad.accumulates_on(device)
    tensor_parallel = plan.layout.tensor > 1
    exchanges = compiles and can_overlap(plan.layout.tensor, plan.gpus_per_node)
    if options.overlap_tensor_parallel is True and tensor_parallel and on_gpu and not exchanges:
        raise LaunchError(
            "overlap_tensor_parallel is on, and the tensor ranks cannot read each other's memory here.",
            why="It needs compiled_regions, and for each tensor group NVIDIA GPUs of one machine that read each other's memory.",
            fix="--set platform_optimizations.nvidia.engine_options.overlap_tensor_parallel=auto",
        )
    sharded = options.distributed_optimizer and options.optimizer_states == "fp32"
    return ResolvedOptions(
        layers=options.layers,
        compiled_regions=compiles,
        streamed_cross_entropy=on(options.streamed_cross_entropy, on_gpu and ours),
        accumulate_weight_gradients=on(options.accumulate_weight_gradients, can_accumulate),
        cudnn_attention=on(options.cudnn_attention, on_gpu and torch.version.hip is None),
        fused_adam=on(options.fused_adam, on_gpu and ours),
        compiled_adam=on(options.compiled_adam, on_gpu and ours) and options.optimizer_states == "fp32",
        distributed_optimizer=sharded,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather and sharded,
        overlap_tensor_parallel=on(options.overlap_tensor_parallel, exchanges)
        and tensor_parallel
        and ours
        and precision != "fp8",
        balanced_stages=options.balanced_stages,
        optimizer_states=options.optimizer_states,
    )


def _check_transformer_engine(plan: RunPlan, on_gpu: bool) -> None:
    """Refuse what its layers cannot do, before the model is built.

    Raises:
        LaunchError: there is no usable Transformer Engine, or a switch needs our own layers.
    """
    key = f"--set platform_optimizations.{plan.platform}.engine_options"
    if not on_gpu or not transformer_engine_is_usable():
        raise LaunchError(
            "layers is transformer_engine, and Transformer Engine cannot run here.",
            why="It needs an NVIDIA GPU." if not on_gpu else "It is not installed, or does not load; the log says which.",
            fix=f"pip install 'transformer-engine[pytorch]', or {key}.layers=local",
        )
    for name in ("compiled_regions", "overlap_tensor_parallel"):
        if getattr(plan.engine_options, name) is True:
            raise LaunchError(
                f"layers is transformer_engine, and {name} is on.",
                why=f"{name} is a part of our own layers.",
                fix=f"{key}.{name}=auto, or {key}.layers=local",
            )
