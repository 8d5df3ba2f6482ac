"""Evidence of what NeMo runs, read from Megatron's parallel state, the built model and the batches."""

from typing import Any

from tprimat.plan.schema import RunPlan
from tprimat.records.schema import Evidence
from tprimat.train.first_batch import FirstBatchHook
from tprimat.train.observed import (
    common_evidence,
    dtype_name,
    layers_in_bf16,
    scaling_and_attention,
    te_matmul_dtype,
    te_modules,
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


def running_options(trainer: Any, watch: FirstBatchHook) -> dict[str, Any]:
    """Return the options of NeMo's that run, under their names, read from the built model and from the wrappers of its chunks."""
    config, replicas = watch.models[0].config, trainer.strategy.megatron_parallel[0].ddp_config
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


def _optimizer(optimizer: Any) -> str:
    megatron = optimizer.mcore_optimizer
    inner = getattr(megatron, "chained_optimizers", [megatron])[0]
    return f"{type(inner).__name__} over {type(inner.optimizer).__name__}"
