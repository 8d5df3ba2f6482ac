"""Evidence of what NeMo runs, read from Megatron's parallel state, the built model and the batches."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch import Tensor

from tprimat.megatron.evidence import capacity_of, count_parameters, dtype_name, matmul_dtype, parallel_sizes, routing_of
from tprimat.megatron.transformer_engine import multiplied_in_fp8, scaling_and_attention, te_modules
from tprimat.megatron.watch import LayerWatch
from tprimat.nemo.recipe import Environment
from tprimat.plan.schema import RunPlan
from tprimat.records.evidence import REDIRECTED, fingerprint, graded, with_facts
from tprimat.records.schema import Evidence

WITHOUT_TRANSFORMER_ENGINE = (
    "NeMo ran without Transformer Engine: torch's attention and norms, no fused kernels. With it, it is faster."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBatch:
    """The first micro-batch that entered the model on this rank."""

    micro_batch_sequences: int
    sequence_tokens: int
    first_sequence: str | None
    """Name of the tokens of this rank's first sequence; None where context parallelism cuts it."""

    @property
    def global_batch_sequences(self) -> int:
        """With the running schedule's number of micro-batches, over all replicas."""
        replicas: int = parallel_state.get_data_parallel_world_size()
        return self.micro_batch_sequences * int(get_num_microbatches()) * replicas

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.global_batch_sequences * self.sequence_tokens


class FirstBatchHook:
    """Observes the first micro-batch that a model gets, and how its first layer treats it.

    Only the first pipeline stage, and so rank 0, gets tokens.
    """

    def __init__(self) -> None:
        self.seen: FirstBatch | None = None
        self.layer: LayerWatch | None = None
        self.models: list[Any] = []
        """Megatron's model of each chunk on this rank, once attached."""
        self._hook: Any = None

    def attach(self, strategy: Any) -> None:
        """Hook into the model of a running strategy; the first micro-batch removes the hook."""
        self.models = _gpt_models(strategy)
        self._hook = self.models[0].register_forward_pre_hook(self._observe, with_kwargs=True)
        self.layer = LayerWatch([list(chunk.decoder.layers) for chunk in self.models])

    def _observe(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs.get("input_ids")
        if isinstance(tokens, Tensor):
            rows, length = tokens.shape
            ranks = parallel_state.get_context_parallel_world_size()
            name = fingerprint(tokens[0].to("cpu", torch.int64).numpy().tobytes()) if ranks == 1 else None
            self.seen = FirstBatch(micro_batch_sequences=rows, sequence_tokens=length * ranks, first_sequence=name)
        self._hook.remove()


def observe(trainer: Any, watch: FirstBatchHook, plan: RunPlan, here: Environment) -> Evidence:
    """Return evidence of a running trainer. Every rank must call it: the parameter count is summed over all of them."""
    strategy = trainer.strategy
    models = _gpt_models(strategy)
    parameters = [parameter for model in models for parameter in model.parameters()]
    first, seen, layer = parameters[0], watch.seen, watch.layer
    fused = te_modules(models)
    narrow = te_modules(models, without=layers_in_bf16(models))
    dtype = _matmul_dtype(narrow, first.dtype, asked=plan.workload.matmul_dtype == "fp8")
    scaling, attention = scaling_and_attention(narrow) if dtype == "fp8" else (None, None)
    again = layer.recomputed(strategy.root_device) if layer else None
    evidence = with_facts(
        parallel_sizes(),
        sequence_parallel=layer.sequence_parallel(seen.sequence_tokens) if seen and layer else None,
        micro_batch_sequences=seen.micro_batch_sequences if seen else None,
        global_batch_sequences=seen.global_batch_sequences if seen else None,
        sequence_tokens=seen.sequence_tokens if seen else None,
        tokens_per_step=seen.tokens_per_step if seen else None,
        parameter_dtype=dtype_name(first.dtype),
        matmul_dtype=dtype,
        attention_dtype=attention,
        layers_in_bf16=len(wide_everywhere(models[0].config)) if dtype == "fp8" else None,
        fp8_scaling=scaling,
        gradient_dtype=dtype_name(first.main_grad.dtype),
        parameters=count_parameters(parameters, strategy.root_device),
        recompute=again.recompute if again else None,
        recompute_modules=again.modules if again else None,
        recompute_layers=again.layers if again else None,
        routing=routing_of(models[0].config),
        expert_capacity=capacity_of(models[0].config),
        attention="Transformer Engine" if fused else "torch scaled_dot_product_attention",
        transformer_engine=bool(fused),
        optimizer=_optimizer(strategy.optimizers[0]),
        data=trainer.datamodule.description,
        first_sequence=seen.first_sequence if seen else None,
        notes=_notes(here),
    )
    return graded(evidence, dict.fromkeys(("routing", "expert_capacity", "attention_dtype", "layers_in_bf16"), "resolved"))


def running_options(trainer: Any) -> dict[str, Any]:
    """Return the options of NeMo's that run, under their names, read from the built model and from the wrappers of its chunks."""
    models = _gpt_models(trainer.strategy)
    config, replicas = models[0].config, trainer.strategy.megatron_parallel[0].ddp_config
    return {
        "cross_entropy_fusion_impl": config.cross_entropy_fusion_impl if config.cross_entropy_loss_fusion else None,
        "grad_reduce_in_fp32": replicas.grad_reduce_in_fp32,
        "overlap_grad_reduce": replicas.overlap_grad_reduce,
        "overlap_param_gather": replicas.overlap_param_gather,
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
        "tp_comm_overlap": config.tp_comm_overlap,
        "cuda_graph_impl": graphs_of(models, stepped=trainer.global_step > 0),
        "first_last_layers_bf16": bool(wide_everywhere(config)),
        **({"fp8_recipe": config.fp8_recipe} if config.fp8 else {}),
    }


def graphs_of(models: list[Any], *, stepped: bool) -> Literal["none", "local"]:
    """Return whose CUDA graphs run the layers of this rank. After the first step, each layer must hold a captured one."""
    layers = [layer for model in models for layer in model.decoder.layers]
    managers = [layer.cudagraph_manager for layer in layers if hasattr(layer, "cudagraph_manager")]
    captured = [any(runner.fwd_graph is not None for runner in manager.cudagraph_runners) for manager in managers]
    return "local" if managers and len(managers) == len(layers) and (all(captured) or not stepped) else "none"


def layers_in_bf16(models: list[Any]) -> list[Any]:
    """Return the layers on this rank that NeMo's recipe for fp8 with present scales leaves in bf16: the first and the last."""
    numbers = wide_everywhere(models[0].config)
    return [layer for model in models for layer in model.decoder.layers if layer.layer_number in numbers]


def wide_everywhere(config: Any) -> set[int]:
    """Return the numbers, from 1, of the layers of the whole model that stay in bf16 under fp8."""
    if not config.fp8 or not config.first_last_layers_bf16:
        return set()
    last = config.num_layers - config.num_layers_at_end_in_bf16
    return set(range(1, config.num_layers + 1)) - set(range(config.num_layers_at_start_in_bf16 + 1, last + 1))


def _matmul_dtype(fused: list[Any], weights: torch.dtype, *, asked: bool) -> str | None:
    """Return what the linear layers multiply; None where fp8 was asked for and none has multiplied yet.

    Only Transformer Engine multiplies in fp8 here: NeMo's configuration may say so, and its layers do something else.
    """
    in_fp8 = multiplied_in_fp8(fused) if fused else False
    if asked and in_fp8 is None:
        return None
    return "fp8" if in_fp8 else matmul_dtype(weights)


def _gpt_models(strategy: Any) -> list[Any]:
    """Return Megatron's own model of each chunk, from inside the wrappers for precision and gradients."""
    return [module for chunk in strategy.megatron_parallel for module in chunk.modules() if isinstance(module, GPTModel)]


def _optimizer(optimizer: Any) -> str:
    megatron = optimizer.mcore_optimizer
    inner = getattr(megatron, "chained_optimizers", [megatron])[0]
    return f"{type(inner).__name__} over {type(inner.optimizer).__name__}"


def _notes(here: Environment) -> tuple[str, ...]:
    notes = [] if here.transformer_engine else [WITHOUT_TRANSFORMER_ENGINE]
    return tuple(notes if here.on_gpu else [*notes, REDIRECTED])
