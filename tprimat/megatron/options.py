"""Resolve the engine's switches for this device: every `auto` becomes on or off."""

from dataclasses import asdict, replace
from typing import Any

import torch

from tprimat.core.errors import LaunchError
from tprimat.megatron import wgrad
from tprimat.megatron.tp_overlap import can_overlap
from tprimat.plan.schema import EngineOptions, RunPlan
from tprimat.train.startup import transformer_engine_is_usable

OPTIONS = "platform_optimizations.{}.engine_options"


def recorded(plan: RunPlan, options: EngineOptions) -> dict[str, Any]:
    """Return the switches for the record, with the scaling of Transformer Engine's layers only where they multiply in fp8."""
    scales = plan.workload.matmul_dtype == "fp8" and options.layers == "transformer_engine"
    return {name: value for name, value in asdict(options).items() if scales or name != "fp8_scaling"}


def resolve(plan: RunPlan, device: torch.device) -> EngineOptions:
    """Resolve each `auto`: on where a GPU supports it, off on a CPU.

    Raises:
        LaunchError: an option is on and impossible here.
    """
    options, precision = plan.engine_options, plan.workload.matmul_dtype
    on_gpu = device.type == "cuda"
    ours = options.layers == "local"
    if not ours and not transformer_engine_is_usable():
        raise LaunchError(
            "layers is transformer_engine, and Transformer Engine cannot be imported.",
            why="The log says why.",
            fix=f"pip install 'transformer-engine[pytorch]', or --set {OPTIONS.format(plan.platform)}.layers=local",
        )

    def on(requested: bool | str, default: bool) -> bool:
        return default if isinstance(requested, str) else requested

    compiles = on(options.compiled_regions, on_gpu and ours)
    can_accumulate = on_gpu and precision in {"bf16", "fp8"} and wgrad.accumulates_on(device)
    exchanges = compiles and can_overlap(plan.workload.layout.tensor, plan.gpus_per_node)
    if on_gpu and not exchanges:
        _refuse_exchanges(plan)
    return replace(
        options,
        compiled_regions=compiles,
        streamed_cross_entropy=on(options.streamed_cross_entropy, (on_gpu and ours) or options.fp8_output_layer),
        accumulate_weight_gradients=on(options.accumulate_weight_gradients, can_accumulate and not options.fully_shard),
        compiled_adam=on(options.compiled_adam, on_gpu and ours) and options.optimizer_states == "fp32",
        distributed_optimizer=options.distributed_optimizer and options.optimizer_states == "fp32",
        overlap_tensor_parallel=on(options.overlap_tensor_parallel, exchanges)
        and plan.workload.layout.tensor > 1
        and ours
        and precision != "fp8",
        gradients=options.gradients if options.optimizer_states == "fp32" else "bf16",
    )


def _refuse_exchanges(plan: RunPlan) -> None:
    """Refuse a plan that asks for tensor ranks to read each other's memory."""
    if plan.engine_options.overlap_tensor_parallel is True and plan.workload.layout.tensor > 1:
        raise LaunchError(
            "overlap_tensor_parallel is on, and the tensor ranks cannot read each other's memory here.",
            why="It needs compiled_regions, and for each tensor group NVIDIA GPUs of one machine that read each other's memory.",
            fix=f"--set {OPTIONS.format(plan.platform)}.overlap_tensor_parallel=auto",
        )
