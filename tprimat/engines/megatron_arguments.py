"""A plan as Megatron-LM's arguments, by the names of its parser (megatron/training/arguments.py), which Primus's keys share.

Megatron accepts some arguments and then recomputes them; for those the one that has an effect is used, such as
`num_virtual_stages_per_pipeline_rank`.
"""

from collections.abc import Mapping, Sequence

from tprimat.plan.schema import RunPlan, Scalar

Value = Scalar | Sequence[Scalar]

RECOMPUTE: Mapping[str, tuple[str | None, str | None, int | None]] = {
    "none": (None, None, None),
    "selective": ("selective", None, None),
    "full": ("full", "uniform", 1),
}
"""Our setting -> granularity, method, layers. Megatron refuses full recomputation without a method."""


def decided_arguments(plan: RunPlan) -> dict[str, Value]:
    """Return argument -> value of what a plan decides, whichever program takes them; None and False: not given."""
    shape, layout, batch, options = plan.workload.shape, plan.workload.layout, plan.workload, plan.engine_options
    granularity, method, layers = RECOMPUTE[plan.workload.recompute]
    if plan.workload.recompute_layers is not None:
        method, layers = "block", plan.workload.recompute_layers
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "group_query_attention": shape.kv_heads != shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        **_experts(plan),
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "num_virtual_stages_per_pipeline_rank": layout.virtual_pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": layout.sequence_parallel,
        "use_distributed_optimizer": options.distributed_optimizer,
        "overlap_grad_reduce": True,
        "overlap_param_gather": options.distributed_optimizer,
        "micro_batch_size": batch.micro_batch_sequences,
        "global_batch_size": batch.global_batch_sequences,
        "seq_length": batch.sequence_tokens,
        "max_position_embeddings": batch.sequence_tokens,
        "train_iters": plan.steps,
        "seed": plan.seed,
        **_optimizer(plan),
        "bf16": plan.workload.matmul_dtype != "fp32",
        "fp16": False,
        "fp8": "hybrid" if plan.workload.matmul_dtype == "fp8" else None,
        "recompute_granularity": granularity,
        "recompute_method": method,
        "recompute_num_layers": layers,
    }


def _experts(plan: RunPlan) -> dict[str, Value]:
    """Return the settings of a mixture of experts; nothing for a dense model.

    Under expert parallelism each expert is whole on its rank. Without it experts are split over the tensor-parallel ranks, which
    is Megatron-Core's default: it would not sum the gradients of whole experts over ranks with different tokens.
    """
    shape = plan.workload.shape
    if shape.experts is None:
        return {}
    return {
        "num_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "expert_tensor_parallel_size": 1 if plan.workload.layout.expert > 1 else plan.workload.layout.tensor,
        "moe_router_force_load_balancing": plan.workload.routing == "balanced",
        "moe_expert_capacity_factor": plan.workload.expert_capacity_factor,
    }


def _optimizer(plan: RunPlan) -> dict[str, Value]:
    """Return the embedded engine's schedule. Megatron requires the warm-up to be shorter than the decay, even in a short run."""
    requested = plan.optimizer
    warmup = min(requested.warmup_steps, plan.steps - 1)
    return {
        "lr": float(requested.learning_rate),
        "min_lr": float(requested.min_learning_rate),
        "lr_warmup_init": 0.0 if requested.warmup_steps == 0 else requested.learning_rate / (requested.warmup_steps + 1),
        "lr_warmup_iters": warmup,
        "lr_decay_iters": plan.steps,
        "lr_decay_style": requested.schedule,
        "weight_decay": float(requested.weight_decay),
        "adam_beta1": float(requested.beta1),
        "adam_beta2": float(requested.beta2),
        "adam_eps": float(requested.epsilon),
        "clip_grad": float(requested.gradient_clipping),
    }
