"""What a Megatron-Core model shows while it trains, whichever trainer built it, including its first micro-batch."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Parameter

from tprimat.core.rows import DATA, document, placed
from tprimat.core.workload import ExpertCapacity, Fp8Scaling, Routing
from tprimat.records.evidence import graded, with_facts
from tprimat.records.schema import Evidence
from tprimat.train.callback import LOADS

RESOLVED = (
    *("sequence_parallel", "recompute", "recompute_modules", "recompute_layers", "routing", "expert_capacity"),
    *("attention_dtype", "layers_in_bf16"),
)
"""Facts that are read from the built configuration; all others are seen in what runs."""


def batch_facts(tokens: Tensor, micro_batches: int, cut_over: int = 1) -> dict[str, Any]:
    """Return the batch of a step by this rank's first micro-batch, (sequences, tokens); a digest of whole sequences only."""
    rows, part = tokens.shape
    sequences = rows * micro_batches * parallel_state.get_data_parallel_world_size()
    words = tokens[0].to("cpu", torch.int64).numpy().tobytes()  # little-endian
    return {
        "micro_batch_sequences": rows,
        "global_batch_sequences": sequences,
        "sequence_tokens": part * cut_over,
        "tokens_per_step": sequences * part * cut_over,
        "first_sequence": hashlib.sha256(words).hexdigest()[:16] if cut_over == 1 else None,
    }


def common_evidence(
    models: Sequence[torch.nn.Module], config: TransformerConfig, batch: dict[str, Any] | None, **own: Any
) -> Evidence:
    """Return what every trainer shows in the same way, with its `own` facts, by field.

    Every rank must call it: parameters are summed. `models` are the chunks of this rank; before its first step there is no batch.
    """
    routes = config.num_moe_experts is not None
    routing: Routing = "balanced" if config.moe_router_force_load_balancing else "natural"
    capacity: ExpertCapacity = config.moe_expert_capacity_factor or "unlimited"
    again = config.recompute_granularity or "none"
    evidence = with_facts(
        Evidence(source="running_framework", world_size=dist.get_world_size()),
        tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_parallel=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        context_parallel=parallel_state.get_context_parallel_world_size(),
        expert_parallel=parallel_state.get_expert_model_parallel_world_size(),
        data_parallel=parallel_state.get_data_parallel_world_size(),
        **(batch or {}),
        sequence_parallel=config.sequence_parallel and parallel_state.get_tensor_model_parallel_world_size() > 1,
        parameters=count_parameters(weight for model in models for weight in model.parameters()),
        recompute=again,
        recompute_modules=tuple(sorted(config.recompute_modules)) if again == "selective" else None,
        recompute_layers=config.recompute_num_layers if config.recompute_method == "block" else None,
        routing=routing if routes else None,
        expert_capacity=capacity if routes else None,
        transformer_engine=bool(te_modules(models)),
        **own,
    )
    return graded(evidence, dict.fromkeys(RESOLVED, "resolved"))


def count_parameters(parameters: Iterable[Parameter]) -> int:
    """Count each weight of the whole model once: slices are added up, copies are left out."""
    own, device = 0, torch.device("cpu")
    first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    first_slice = parallel_state.get_tensor_model_parallel_rank() == 0
    for parameter in parameters:
        device = parameter.device
        if not getattr(parameter, "allreduce", True):  # so Megatron marks experts that are spread over ranks
            own += parameter.numel() if parallel_state.get_expert_data_parallel_rank() == 0 else 0
        elif first_replica:
            # `shared` marks the last stage's copy of a tied embedding.
            copy = getattr(parameter, "shared", False) and parallel_state.get_pipeline_model_parallel_world_size() > 1
            if not copy and (first_slice or getattr(parameter, "tensor_model_parallel", False)):
                own += parameter.numel()
    total = torch.tensor([own], dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return int(total.item())


def dtype_name(dtype: torch.dtype) -> str:
    """Return a name such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def matmul_dtype(dtype: torch.dtype) -> str:
    """Return what the matrix units multiply when weights have this dtype."""
    if dtype is torch.bfloat16:
        return "bf16"
    return "tf32" if torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32 else "fp32"


def layers_in_bf16(config: Any) -> set[int]:
    """Return the numbers, from 1, of the layers of the model that stay in bf16 under fp8: in some recipes first and last."""
    if not config.fp8 or not config.first_last_layers_bf16:
        return set()
    last = config.num_layers - config.num_layers_at_end_in_bf16
    return set(range(1, config.num_layers + 1)) - set(range(config.num_layers_at_start_in_bf16 + 1, last + 1))


# Transformer Engine's modules.

PACKAGE = "transformer_engine"
RECIPES: Mapping[str, Fp8Scaling] = document(DATA / "precisions.yaml")[PACKAGE]


def te_modules(models: Iterable[torch.nn.Module], without: Iterable[torch.nn.Module] = ()) -> list[Any]:
    """Return the modules of Transformer Engine in the chunks of a model, without those in some of its layers."""
    left_out = {part for layer in without for part in layer.modules()}
    parts = [part for model in models for part in model.modules() if part not in left_out]
    return [part for part in parts if any(base.__module__.partition(".")[0] == PACKAGE for base in type(part).__mro__)]


def te_precision(modules: Sequence[Any], weights: torch.dtype, *, fp8_asked: bool) -> dict[str, str | None]:
    """Return what linear layers of Transformer Engine multiply, and how fp8 scales, as facts of the evidence.

    They multiply in fp8 if each has made the quantizers of its product, which is not known before the first one.
    """
    linear = [part for part in modules if isinstance(getattr(part, "weight", None), Tensor) and hasattr(part, "fp8_meta")]
    if fp8_asked and not any(hasattr(part, "fp8") for part in linear):
        return {}
    if not linear or not all(getattr(part, "fp8", False) and getattr(part, "fp8_initialized", False) for part in linear):
        return {"matmul_dtype": matmul_dtype(weights)}
    scaling, attention = scaling_and_attention(modules)
    return {"matmul_dtype": "fp4" if scaling == "nvfp4" else "fp8", "fp8_scaling": scaling, "attention_dtype": attention}


def scaling_and_attention(modules: Sequence[Any]) -> tuple[Fp8Scaling | None, str | None]:
    """Return how values were scaled to 8 bits, and fp8 if attention was, too; None and None where nothing was."""
    ran = (part.fp8_meta.get("recipe") for part in modules if getattr(part, "fp8", False) and hasattr(part, "fp8_meta"))
    recipe = next((one for one in ran if one is not None), None)
    if recipe is None:
        return None, None
    names = (RECIPES.get(kind.__name__) for kind in type(recipe).__mro__)  # Megatron-Core has subclasses of them
    attends = getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False)
    return next(filter(None, names), None), "fp8" if attends else None


# How evenly the tokens of a step were spread over experts and over the ranks that share them.


class RoutingCounts:
    """Counts the choices of each expert in the forward passes of a layer: by itself in one of Megatron's own routers."""

    def __init__(self, router: TopKRouter | None = None) -> None:
        self.counts: list[Tensor] = []
        """Of each forward pass in this step: this rank's rows for each of all experts."""
        self.choices = 0
        """Of experts by this rank's tokens in a forward pass, dropped ones included."""
        if router is not None:
            router.register_forward_hook(self._count_map)

    def note(self, counts: Tensor, choices: int) -> None:
        """Note a forward pass, unless it is one that the backward pass repeats."""
        if torch.is_grad_enabled():
            self.counts.append(counts)
            self.choices = choices

    def _count_map(self, router: TopKRouter, inputs: tuple[Tensor, ...], result: tuple[Tensor, Tensor]) -> None:
        """Count the routing map of a forward pass, shape (tokens, experts)."""
        del inputs
        self.note(result[1].sum(dim=0, dtype=torch.int32), result[1].shape[0] * router.topk)


def watch_routers(model: torch.nn.Module) -> None:
    """Count the choices that Megatron's own routers in a model make; the embedded engine's layers count by themselves."""
    for part in model.modules():
        if type(part) is TopKRouter:
            part.routing_counts = RoutingCounts(part)  # type: ignore[assignment]


SUMS = 4


def load_sums(chunks: Iterable[torch.nn.Module], device: torch.device) -> Tensor:
    """Sum up loads and dropped choices over this rank's layers and micro-batches, without waiting; forget the counts.

    The ranks that share experts must all call it. Returns (SUMS,), fp64, the same on all of them: the sums of the tokens of the
    busiest expert over the mean, of the same of ranks, and of the share of dropped choices; and the number of summands.
    """
    parts = (part for chunk in chunks for part in chunk.modules())
    layers = [layer for part in parts if (layer := getattr(part, "routing_counts", None)) is not None]
    counts = [count for layer in layers for count in layer.counts]
    for layer in layers:
        layer.counts.clear()
    if not counts:
        return torch.zeros(SUMS, dtype=torch.float64, device=device)
    own = torch.stack(counts)
    group = parallel_state.get_expert_model_parallel_group()
    ranks = group.size()
    if ranks > 1:
        dist.all_reduce(own, group=group)
    of_experts = own.double()
    of_ranks = of_experts.view(len(counts), ranks, -1).sum(dim=-1)
    busiest = [(load.amax(dim=1) / load.mean(dim=1)).sum() for load in (of_experts, of_ranks)]
    dropped = (1 - of_experts.sum(dim=1) / (layers[0].choices * ranks)).sum()  # all micro-batches have as many tokens
    return torch.stack([*busiest, dropped, torch.full_like(dropped, len(counts))])


def mean_loads(chunks: Iterable[torch.nn.Module], device: torch.device) -> dict[str, Tensor]:
    """Return expert_load, rank_load and dropped, the means of `load_sums` over all ranks, for the callback.

    Every rank must call it, after each step.
    """
    sums = load_sums(chunks, device)
    dist.all_reduce(sums)
    *parts, times = sums.unbind()
    return dict(zip(LOADS, (part / times for part in parts), strict=True))


# A model that another framework has built.


class FirstBatchHook:
    """Observes the first micro-batch that a model gets; only the first pipeline stage, and so rank 0, gets tokens."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] | None = None
        self.models: list[Any] = []
        self.watches_routers = False

    def attach(self, chunks: Sequence[Any]) -> None:
        """Hook into Megatron's own model of each chunk, inside the wrappers for precision and gradients."""
        self.models = [module for chunk in chunks for module in chunk.modules() if isinstance(module, GPTModel)]
        # Megatron-Core calls the embedding in any schedule; where passes overlap, nothing calls the model itself.
        if hasattr(self.models[0], "embedding"):
            self._hook = self.models[0].embedding.register_forward_pre_hook(self._observe, with_kwargs=True)
        config = self.models[0].config
        # A layer with hooks cannot be captured as a CUDA graph.
        self.watches_routers = config.num_moe_experts is not None and getattr(config, "cuda_graph_impl", "none") == "none"
        for model in self.models if self.watches_routers else ():
            watch_routers(model)

    def _observe(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._hook.remove()
        tokens = args[0] if args else kwargs.get("input_ids")
        if isinstance(tokens, Tensor):
            self.seen = batch_facts(tokens, int(get_num_microbatches()), parallel_state.get_context_parallel_world_size())

    def evidence(self, optimizer: Any, *, fp8_asked: bool, **own: Any) -> Evidence:
        """Return evidence of what runs, with further facts. Every rank must call it: parameters are summed over all."""
        first, config = next(self.models[0].parameters()), self.models[0].config
        wide = layers_in_bf16(config)
        kept = [layer for model in self.models for layer in model.decoder.layers if layer.layer_number in wide]
        fused = te_modules(self.models, without=kept)
        precision = te_precision(fused, first.dtype, fp8_asked=fp8_asked and bool(fused))
        inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
        return common_evidence(
            self.models,
            config,
            self.seen,
            **precision,
            parameter_dtype=dtype_name(first.dtype),
            gradient_dtype=dtype_name(first.main_grad.dtype),
            layers_in_bf16=len(wide) if precision.get("matmul_dtype") in {"fp8", "fp4"} else None,
            attention="Transformer Engine" if fused else "Megatron-Core's local attention",
            optimizer=f"{type(inner).__name__} over {type(inner.optimizer).__name__}",
            **own,
        )

    def running_options(self, replicas: Any) -> dict[str, Any]:
        """Return what changes speed or memory, under Megatron-Core's names, from the built model and its chunks' `ddp_config`."""
        config = self.models[0].config
        return {
            "cross_entropy_fusion_impl": config.cross_entropy_fusion_impl if config.cross_entropy_loss_fusion else None,
            **placed("megatron_names.running", replicas=replicas, config=config),
            "first_last_layers_bf16": bool(layers_in_bf16(config)),
            "moe_token_dispatcher_type": config.moe_token_dispatcher_type if config.num_moe_experts else None,
            **({"fp8_recipe": config.fp8_recipe} if config.fp8 else {}),
        }
