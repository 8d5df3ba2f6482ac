"""Evidence of what the embedded engine runs, read from Megatron's parallel state, the weights, the buffers and the batches."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch.nn import Parameter

from tprimat.core.workload import ExpertCapacity, Fp8Scaling, Routing, Workload
from tprimat.megatron import transformer_engine
from tprimat.megatron.compat import compiled_graphs
from tprimat.megatron.fp8 import Fp8OutputProducts, Fp8Products
from tprimat.megatron.fully_shard import own_part, ranks_sharing
from tprimat.megatron.latent_attention import WholeLinear
from tprimat.megatron.layers import SDPACoreAttention
from tprimat.megatron.linear import ChosenProducts, LinearProducts
from tprimat.megatron.loss import ChunkedLossModel
from tprimat.megatron.module import MegatronModule
from tprimat.records.evidence import CAUTION, REDIRECTED, graded, with_facts
from tprimat.records.schema import Evidence


def observe(module: MegatronModule, redirected: bool) -> Evidence:
    """Return evidence of a running module. Every rank must call it: the parameter count is summed over all of them."""
    seen, (compiled, from_cache) = module.observed, compiled_graphs()
    parameter = next(module.chunks[0].parameters())
    gradient = getattr(parameter, "main_grad", parameter.grad)
    # The dtype of a part says nothing of the one in which its weight is gathered.
    computed = module.watch.weight_dtype or (parameter.dtype if own_part(parameter) is parameter else None)
    again = module.watch.recomputed(module.device)
    in_fp8, dtype = _output_layer_in_fp8(module), None if computed is None else _matmul_dtype(module, computed)
    scaling, attention = _scaling_and_attention(module) if dtype == "fp8" else (None, None)
    evidence = with_facts(
        parallel_sizes(),
        sequence_parallel=module.watch.sequence_parallel(seen.sequence_tokens) if seen else None,
        micro_batch_sequences=seen.micro_batch_sequences if seen else None,
        global_batch_sequences=seen.global_batch_sequences if seen else None,
        sequence_tokens=seen.sequence_tokens if seen else None,
        tokens_per_step=seen.tokens_per_step if seen else None,
        parameter_dtype=None if computed is None else dtype_name(computed),
        matmul_dtype=dtype,
        output_layer_dtype="fp8" if in_fp8 else None,
        attention_dtype=attention,
        fp8_scaling=scaling,
        gradient_dtype=None if gradient is None else dtype_name(gradient.dtype),
        weights_split_over=ranks_sharing(parameter),
        parameters=count_parameters((weight for chunk in module.chunks for weight in chunk.parameters()), module.device),
        recompute=again.recompute if again else None,
        recompute_modules=again.modules if again else None,
        recompute_layers=again.layers if again else None,
        routing=routing_of(module.config),
        expert_capacity=capacity_of(module.config),
        attention=attention_backend(module),
        transformer_engine=bool(transformer_engine.te_modules(module.chunks)),
        optimizer=module.megatron_optimizer.description,
        data=None if module.sequences is None else module.sequences.description,
        first_sequence=seen.first_sequence if seen else None,
        graphs_compiled=compiled,
        graphs_from_cache=from_cache,
        notes=(
            *((REDIRECTED,) if redirected else ()),
            *_uneven_stages(module),
            *(("The output layer multiplied in fp8, too.",) if in_fp8 else ()),
            *untested(module),
        ),
    )
    return graded(evidence, dict.fromkeys(("routing", "expert_capacity", "attention_dtype"), "resolved"))


def routing_of(config: TransformerConfig) -> Routing | None:
    """Return how the tokens of a model choose experts; None for a model without any."""
    if config.num_moe_experts is None:
        return None
    return "balanced" if config.moe_router_force_load_balancing else "natural"


def capacity_of(config: TransformerConfig) -> ExpertCapacity | None:
    """Return how much an expert takes; None for a model without any."""
    return None if config.num_moe_experts is None else config.moe_expert_capacity_factor or "unlimited"


def parallel_sizes() -> Evidence:
    """Return the part that Megatron-Core's parallel state holds, whichever trainer set it up."""
    return Evidence(
        source="running_framework",
        world_size=dist.get_world_size(),
        workload=Workload(
            tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline_parallel=parallel_state.get_pipeline_model_parallel_world_size(),
            virtual_pipeline=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            context_parallel=parallel_state.get_context_parallel_world_size(),
            expert_parallel=parallel_state.get_expert_model_parallel_world_size(),
            data_parallel=parallel_state.get_data_parallel_world_size(),
        ),
    )


def attention_backend(module: MegatronModule) -> str:
    """Return the attention call, and the kernels behind it once a layer has run."""
    if transformer_engine.te_modules(module.chunks):
        return "Transformer Engine"
    parts = (part for chunk in module.chunks for part in chunk.modules() if isinstance(part, SDPACoreAttention))
    chosen = next((part.backend for part in parts if part.backend), None)
    return "torch scaled_dot_product_attention" + (f", {chosen}" if chosen else "")


def matmul_dtype(dtype: torch.dtype) -> str:
    """Return what the matrix units multiply when weights have this dtype."""
    if dtype is torch.bfloat16:
        return "bf16"
    return "tf32" if torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32 else "fp32"


def _uneven_stages(module: MegatronModule) -> tuple[str, ...]:
    last = module.config.num_layers_in_last_pipeline_stage
    if last is None or last * module.config.pipeline_model_parallel_size == module.config.num_layers:
        return ()
    return (f"The last pipeline stage has {last} of {module.config.num_layers} layers, and the output layer.",)


def untested(module: MegatronModule) -> tuple[str, ...]:
    """Return a caution where CUDA graphs run what no GPU has been seen to record."""
    if module.graphs is None or module.plan.workload.matmul_dtype != "fp8" or module.plan.workload.layout.tensor == 1:
        return ()
    return (f"{CAUTION}CUDA graphs in fp8 over tensor ranks are untested: compare the losses with those of a run without.",)


def _output_layer_in_fp8(module: MegatronModule) -> bool:
    """Whether the output layer, which may be on another rank, has multiplied in fp8."""
    if not module.options.fp8_output_layer:
        return False
    losses = (part for chunk in module.chunks for part in chunk.modules() if isinstance(part, ChunkedLossModel))
    products = sum(part.output_products.products for part in losses if isinstance(part.output_products, Fp8OutputProducts))
    return bool(_over_all_ranks(products, module.device))


def _matmul_dtype(module: MegatronModule, weights: torch.dtype) -> str | None:
    if modules := transformer_engine.te_modules(module.chunks):
        asked = module.config.fp8 is not None
        in_fp8 = transformer_engine.multiplied_in_fp8(modules)
        return None if asked and in_fp8 is None else "fp8" if in_fp8 else matmul_dtype(weights)
    return layers_matmul_dtype(_kernels(module), weights)


def _scaling_and_attention(module: MegatronModule) -> tuple[Fp8Scaling | None, str | None]:
    """Return how a module in fp8 scales, and fp8 if its attention is in it, too. Our own layers scale by current maxima."""
    modules = transformer_engine.te_modules(module.chunks)
    return transformer_engine.scaling_and_attention(modules) if modules else ("current", None)


def _kernels(module: MegatronModule) -> list[LinearProducts]:
    """Return what the layers multiply with, routers and experts apart."""
    kernels: list[LinearProducts] = []
    for part in (part for chunk in module.chunks for part in chunk.modules()):
        if isinstance(part, ChosenProducts):
            kernels.append(part.tp_context.products)
        elif isinstance(part, WholeLinear):
            kernels.append(part.alone.products)
    return kernels


def layers_matmul_dtype(kernels: Sequence[LinearProducts], weights: torch.dtype) -> str | None:
    """Return the dtype of the layers' products; None for fp8 kernels that have not run yet, before the first step.

    fp8 only if every linear layer has multiplied in it; attention never does, and the output layer has a field of its own.
    """
    products = [kernel.products if isinstance(kernel, Fp8Products) else None for kernel in kernels]
    if products and all(products):
        return "fp8"
    return None if products and all(number == 0 for number in products) else matmul_dtype(weights)


def count_parameters(parameters: Iterable[Parameter], device: torch.device) -> int:
    """Count each weight of the whole model once: slices are added up, copies are left out."""
    own = 0
    first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    first_slice = parallel_state.get_tensor_model_parallel_rank() == 0
    for parameter in parameters:
        if not getattr(parameter, "allreduce", True):  # so Megatron marks experts that are spread over ranks
            own += parameter.numel() if parallel_state.get_expert_data_parallel_rank() == 0 else 0
        elif first_replica:
            # `shared` marks the last stage's copy of a tied embedding.
            copy = getattr(parameter, "shared", False) and parallel_state.get_pipeline_model_parallel_world_size() > 1
            if not copy and (first_slice or getattr(parameter, "tensor_model_parallel", False)):
                own += parameter.numel()
    return _over_all_ranks(own, device)


def _over_all_ranks(number: int, device: torch.device) -> int:
    total = torch.tensor([number], dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return int(total.item())


def dtype_name(dtype: torch.dtype) -> str:
    """Return a name such as bfloat16."""
    return str(dtype).removeprefix("torch.")
