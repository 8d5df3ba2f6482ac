"""The facts of a plan under Megatron-Core's names: those of its configurations, which recipes share, and those of its parser.

The recipes are NeMo's and Bridge's. The parser's names (megatron/training/arguments.py) are Primus's keys, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tprimat.config.schema import OptimizerConfig
from tprimat.core.models import ModelShape
from tprimat.core.rows import placed
from tprimat.core.workload import FullWorkload, Layout
from tprimat.plan.schema import RunPlan, Scalar


def config_fields(shape: ModelShape) -> dict[str, Any]:
    """Return a shape in the names of TransformerConfig, as far as all of its kinds have them."""
    experts = {} if shape.experts is None else placed("megatron_names.experts", shape=shape)
    return {**placed("megatron_names.dimensions", shape=shape), **placed("megatron_names.config", shape=shape), **experts}


def recipe_fields(shape: ModelShape) -> dict[str, Any]:
    """Return the same, and what the configuration of a recipe's model has in addition."""
    return {**config_fields(shape), **placed("megatron_names.recipe", shape=shape)}


def layout_fields(layout: Layout) -> dict[str, Any]:
    """Return how the ranks share the model."""
    return placed("megatron_names.layout", layout=layout)


def routing_fields(work: FullWorkload) -> dict[str, Any]:
    """Return how tokens choose experts; nothing for a dense model."""
    if work.shape.experts is None:
        return {}
    return {
        "moe_router_force_load_balancing": work.routing == "balanced",
        "moe_expert_capacity_factor": work.expert_capacity_factor,
    }


def router_fields(shape: ModelShape) -> dict[str, Any]:
    """Return how a router scores experts and keeps them balanced; nothing for a dense model."""
    if shape.experts is None:
        return {}
    return {
        "moe_router_score_function": shape.router_score,
        "moe_router_pre_softmax": shape.router_score == "softmax" and not shape.router_normalized,
        "moe_router_topk_scaling_factor": None if shape.router_scale == 1 else shape.router_scale,
        "moe_router_enable_expert_bias": shape.router_bias,
        "moe_router_num_groups": shape.router_groups,
        "moe_router_group_topk": shape.router_best_groups,
        "moe_router_load_balancing_type": "seq_aux_loss" if shape.balance_by_sequence else "aux_loss",
        "moe_aux_loss_coeff": shape.balance_loss,
    }


def recompute_fields(work: FullWorkload) -> dict[str, Any]:
    """Return what the backward pass computes again. Megatron refuses full recomputation without a method."""
    full, whole = work.recompute == "full", work.recompute_layers is None
    return {
        "recompute_granularity": None if work.recompute == "none" else work.recompute,
        "recompute_method": ("uniform" if whole else "block") if full else None,
        "recompute_num_layers": (work.recompute_layers or 1) if full else None,
        "recompute_modules": list(work.recompute_modules or ()) or None,
    }


def optimizer_fields(settings: OptimizerConfig) -> dict[str, float]:
    """Return the optimizer without its schedule."""
    return {name: float(value) for name, value in placed("megatron_names.optimizer", settings=settings).items()}


def warmup_steps(plan: RunPlan) -> int:
    """Return the steps of warm-up: Megatron requires fewer than decay, however short the run is."""
    return min(plan.optimizer.warmup_steps, max(plan.steps - 1, 0))


def first_learning_rate(settings: OptimizerConfig) -> float:
    """Return where warm-up begins: one step of it above 0."""
    return 0.0 if settings.warmup_steps == 0 else settings.learning_rate / (settings.warmup_steps + 1)


def set_fields(target: object, fields: Mapping[str, Any]) -> None:
    """Set them on a configuration."""
    for name, value in fields.items():
        setattr(target, name, value)


Value = Scalar | Sequence[Scalar]


def parser_arguments(plan: RunPlan) -> dict[str, Value]:
    """Return argument -> value of what a plan decides, whichever program takes them; None and False: not given.

    Megatron accepts some arguments and then recomputes them; for those the one that has an effect is used, such as
    `num_virtual_stages_per_pipeline_rank`.
    """
    work, distributes = plan.workload, plan.engine_options.distributed_optimizer
    layout = layout_fields(work.layout)
    layout["num_virtual_stages_per_pipeline_rank"] = layout.pop("virtual_pipeline_model_parallel_size")
    recompute = recompute_fields(work)
    del recompute["recompute_modules"]
    # Under expert parallelism each expert is whole on its rank. Without it experts are split over the tensor-parallel ranks,
    # which is Megatron-Core's default: it would not sum the gradients of whole experts over ranks with different tokens.
    experts: dict[str, Value] = {
        "num_experts": work.shape.experts,
        "moe_router_topk": work.shape.experts_per_token,
        "moe_ffn_hidden_size": work.shape.expert_ffn,
        "expert_tensor_parallel_size": 1 if work.layout.expert > 1 else work.layout.tensor,
        **routing_fields(work),
    }
    return {
        **placed("megatron_names.dimensions", shape=work.shape),
        "group_query_attention": work.shape.kv_heads != work.shape.heads,
        **(experts if work.shape.experts else {}),
        **layout,
        "use_distributed_optimizer": distributes,
        "overlap_grad_reduce": True,
        "overlap_param_gather": distributes,
        **placed("megatron_names.run", plan=plan, work=work),
        **optimizer_fields(plan.optimizer),
        "lr_warmup_init": first_learning_rate(plan.optimizer),
        "lr_warmup_iters": warmup_steps(plan),
        **placed("megatron_names.schedule", plan=plan),
        "bf16": work.matmul_dtype != "fp32",
        "fp16": False,
        "fp8": "hybrid" if work.matmul_dtype == "fp8" else None,
        **recompute,
    }
