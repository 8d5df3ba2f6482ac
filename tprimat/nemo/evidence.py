"""Evidence of what NeMo runs, read from Megatron's parallel state, the built model and the batches."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches

from tprimat.plan.schema import RunPlan
from tprimat.records.schema import Evidence
from tprimat.train.expert_loads import watch_routers
from tprimat.train.layer_watch import LayerWatch, before_first_call
from tprimat.train.observed import (
    ObservedBatch,
    common_evidence,
    dtype_name,
    name_of_tokens,
    scaling_and_attention,
    te_matmul_dtype,
    te_modules,
)


class FirstBatchHook:
    """Observes the first micro-batch that a model gets, and how its layers treat it.

    Only the first pipeline stage, and so rank 0, gets tokens.
    """

    def __init__(self) -> None:
        self.seen: ObservedBatch | None = None
        self.layers: LayerWatch
        self.models: list[Any] = []
        """Megatron's model of each chunk on this rank, once attached."""

    def attach(self, strategy: Any) -> None:
        """Hook into the model of a running strategy."""
        self.models = _gpt_models(strategy)
        before_first_call(self.models[0], self._observe)
        self.layers = LayerWatch([list(chunk.decoder.layers) for chunk in self.models])
        for model in self.models:
            watch_routers(model)

    def _observe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs.get("input_ids")
        if isinstance(tokens, torch.Tensor):
            (rows, part), ranks = tokens.shape, parallel_state.get_context_parallel_world_size()
            sequences = rows * int(get_num_microbatches()) * parallel_state.get_data_parallel_world_size()
            self.seen = ObservedBatch(
                micro_batch_sequences=rows,
                global_batch_sequences=sequences,
                sequence_tokens=part * ranks,
                tokens_per_step=sequences * part * ranks,
                first_sequence=name_of_tokens(tokens[0]) if ranks == 1 else None,
            )


def observe(trainer: Any, watch: FirstBatchHook, plan: RunPlan) -> Evidence:
    """Return evidence of a running trainer. Every rank must call it: the parameter count is summed over all of them."""
    models = watch.models
    first, config = next(models[0].parameters()), models[0].config
    wide = layers_in_bf16(config)
    kept = [layer for model in models for layer in model.decoder.layers if layer.layer_number in wide]
    in_fp8 = te_modules(models, without=kept)
    dtype = te_matmul_dtype(in_fp8, first.dtype, fp8_asked=plan.workload.matmul_dtype == "fp8")
    scaling, attention = scaling_and_attention(in_fp8) if dtype == "fp8" else (None, None)
    return common_evidence(
        models,
        config,
        watch.seen,
        watch.layers,
        parameter_dtype=dtype_name(first.dtype),
        matmul_dtype=dtype,
        attention_dtype=attention,
        layers_in_bf16=len(wide) if dtype == "fp8" else None,
        fp8_scaling=scaling,
        gradient_dtype=dtype_name(first.main_grad.dtype),
        attention="Transformer Engine" if in_fp8 else None,
        optimizer=_optimizer(trainer.strategy.optimizers[0]),
        data=f"NeMo {type(trainer.datamodule).__name__}",
    )


def running_options(trainer: Any) -> dict[str, Any]:
    """Return the options of NeMo's that run, under their names, read from the built model and from the wrappers of its chunks."""
    config, replicas = _gpt_models(trainer.strategy)[0].config, trainer.strategy.megatron_parallel[0].ddp_config
    return {
        "cross_entropy_fusion_impl": config.cross_entropy_fusion_impl if config.cross_entropy_loss_fusion else None,
        "grad_reduce_in_fp32": replicas.grad_reduce_in_fp32,
        "overlap_grad_reduce": replicas.overlap_grad_reduce,
        "overlap_param_gather": replicas.overlap_param_gather,
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
        "tp_comm_overlap": config.tp_comm_overlap,
        "first_last_layers_bf16": bool(layers_in_bf16(config)),
        **({"fp8_recipe": config.fp8_recipe} if config.fp8 else {}),
    }


def layers_in_bf16(config: Any) -> set[int]:
    """Return the numbers, from 1, of the layers of the model that stay in bf16 under fp8: in some recipes first and last."""
    if not config.fp8 or not config.first_last_layers_bf16:
        return set()
    last = config.num_layers - config.num_layers_at_end_in_bf16
    return set(range(1, config.num_layers + 1)) - set(range(config.num_layers_at_start_in_bf16 + 1, last + 1))


def _gpt_models(strategy: Any) -> list[Any]:
    """Return Megatron's own model of each chunk, from inside the wrappers for precision and gradients."""
    return [module for chunk in strategy.megatron_parallel for module in chunk.modules() if isinstance(module, GPTModel)]


def _optimizer(optimizer: Any) -> str:
    megatron = optimizer.mcore_optimizer
    inner = getattr(megatron, "chained_optimizers", [megatron])[0]
    return f"{type(inner).__name__} over {type(inner.optimizer).__name__}"
