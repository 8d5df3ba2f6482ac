"""Train a plan on the embedded engine: resolve its switches, let Lightning train, and say what runs."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tprimat.core.errors import LaunchError
from tprimat.megatron import wgrad
from tprimat.megatron.attention import SDPACoreAttention, WholeLinear
from tprimat.megatron.fp8 import Fp8Products
from tprimat.megatron.linear import ChosenProducts, LinearProducts
from tprimat.megatron.model import own_part, ranks_sharing
from tprimat.megatron.module import MegatronModule, MegatronStrategy
from tprimat.megatron.tp_overlap import can_overlap
from tprimat.plan.graphs import launches_graphs
from tprimat.plan.schema import EngineOptions, RunPlan
from tprimat.records.evidence import REDIRECTED
from tprimat.records.schema import Evidence, RunRecord
from tprimat.train.callback import BenchmarkCallback
from tprimat.train.compat import let_host_go_ahead, lightning, quieten
from tprimat.train.observed import common_evidence, dtype_name, matmul_dtype, te_modules, te_precision
from tprimat.train.profiler import profiling_callbacks
from tprimat.train.rank import StepLog, local_rank, running_record
from tprimat.train.startup import transformer_engine_is_usable


def fit(plan: RunPlan, redirected: bool, callback: Any = None) -> None:
    """Train a plan with Lightning on this rank. The process group stays open for another plan.

    `redirected` says that Megatron's CUDA calls run on the CPU; `callback` is one of Lightning's, called beside ours.
    """
    quieten()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local_rank())
    options = resolve(plan, torch.device("cuda" if on_gpu else "cpu"))

    def describe(trainer: Any, module: MegatronModule) -> RunRecord:
        evidence = observe(module, redirected)
        # Before the first step, what was asked for: a run that is killed never comes here again.
        graphs = module.graphs is not None and (module.graphs.recorded or trainer.global_step == 0)
        return running_record(plan, evidence, recorded(plan, replace(options, cuda_graphs=graphs)))

    recording = BenchmarkCallback(plan.run_directory, describe=describe, log=StepLog(plan))
    measured = [recording, *profiling_callbacks(plan, options.cuda_graphs is True), *([callback] if callback else [])]
    trainer = lightning.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=plan.gpus_per_node,
        num_nodes=plan.nodes,
        strategy=MegatronStrategy(plan, process_group_backend="nccl" if on_gpu else "gloo"),
        max_steps=plan.steps,
        callbacks=measured,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    let_host_go_ahead(trainer)
    # On an NVIDIA GPU torch prefers cuDNN's attention, as its newer versions do by themselves.
    cudnn = [] if torch.version.hip else [SDPBackend.CUDNN_ATTENTION]
    backends = [*cudnn, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True) if on_gpu else nullcontext():
        trainer.fit(MegatronModule(plan, options))


# The switches: every `auto` becomes on or off for this device.

OPTIONS = "platform_optimizations.{}.engine_options"


def recorded(plan: RunPlan, options: EngineOptions) -> dict[str, Any]:
    """Return the switches for the record, with the scaling of Transformer Engine's layers only where they multiply in fp8."""
    scales = plan.workload.matmul_dtype == "fp8" and options.layers == "transformer_engine"
    return {name: value for name, value in asdict(options).items() if scales or name != "fp8_scaling"}


def resolve(plan: RunPlan, device: torch.device) -> EngineOptions:
    """Resolve each `auto`: on where a GPU supports it, off on a CPU. Refuse what is on and impossible here."""
    options, precision = plan.engine_options, plan.workload.matmul_dtype
    on_gpu = device.type == "cuda"
    ours = options.layers == "local"
    if not ours and not transformer_engine_is_usable():
        raise LaunchError(
            "layers is transformer_engine, but Transformer Engine cannot be imported.",
            why="The log says why.",
            fix=f"pip install 'transformer-engine[pytorch]', or --set {OPTIONS.format(plan.platform)}.layers=local",
        )

    accumulates = options.accumulate_weight_gradients
    if accumulates == "auto":
        accumulates = on_gpu and precision in {"bf16", "fp8"} and not options.fully_shard and wgrad.accumulates_on(device)
    return replace(
        options,
        cuda_graphs=launches_graphs(plan),
        accumulate_weight_gradients=accumulates,
        distributed_optimizer=options.distributed_optimizer and options.optimizer_states == "fp32",
        overlap_tensor_parallel=options.overlap_tensor_parallel is not False
        and plan.workload.layout.tensor > 1
        and can_overlap(plan.workload.layout.tensor, plan.gpus_per_node)
        and ours
        and (precision != "fp8" or options.overlap_tensor_parallel is True),
        gradients=options.gradients if options.optimizer_states == "fp32" else "bf16",
    )


# Evidence of what runs, read from the weights, the buffers, the layers and the batches.


def observe(module: MegatronModule, redirected: bool) -> Evidence:
    """Return evidence of a running module. Every rank must call it: the parameter count is summed over all of them."""
    parts, modules = [part for chunk in module.chunks for part in chunk.modules()], te_modules(module.chunks)
    parameter = next(module.chunks[0].parameters())
    gradient = getattr(parameter, "main_grad", parameter.grad)
    # The dtype of a part says nothing of the one in which its weight is gathered.
    computed = parameter.dtype if own_part(parameter) is parameter else module.config.params_dtype
    if modules:
        precision = te_precision(modules, computed, fp8_asked=module.config.fp8 is not None)
    else:
        dtype = layers_matmul_dtype(_kernels(parts), computed)
        precision = {"matmul_dtype": dtype, "fp8_scaling": "current" if dtype == "fp8" else None}
    return common_evidence(
        module.chunks,
        module.config,
        module.observed,
        **precision,
        parameter_dtype=dtype_name(computed),
        gradient_dtype=None if gradient is None else dtype_name(gradient.dtype),
        weights_split_over=ranks_sharing(parameter),
        attention="Transformer Engine" if modules else _attention(parts),
        optimizer=module.megatron_optimizer.description,
        data=None if module.sequences is None else module.sequences.description,
        notes=(REDIRECTED,) if redirected else (),
    )


def _attention(parts: Sequence[torch.nn.Module]) -> str:
    chosen = (part.backend for part in parts if isinstance(part, SDPACoreAttention) and part.backend)
    return ", ".join(("torch scaled_dot_product_attention", *list(chosen)[:1]))


def _kernels(parts: Sequence[Any]) -> list[LinearProducts]:
    contexts = [part.tp_context for part in parts if isinstance(part, ChosenProducts)]
    return [context.products for context in (*contexts, *(part.alone for part in parts if isinstance(part, WholeLinear)))]


def layers_matmul_dtype(kernels: Sequence[LinearProducts], weights: torch.dtype) -> str | None:
    """Return the dtype of the layers' products: fp8 only if all have multiplied in it; None before the first step."""
    products = [kernel.products if isinstance(kernel, Fp8Products) else None for kernel in kernels]
    if products and all(products):
        return "fp8"
    return None if products and all(number == 0 for number in products) else matmul_dtype(weights)
