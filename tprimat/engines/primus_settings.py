"""Translate a plan into Primus's settings: the keys of its pre_trainer module, the experiment file and command-line overrides.

Key names are those of primus/configs/modules/megatron/*.yaml and primus/configs/models/megatron/*.yaml (AMD-AGI/Primus,
v0.2.0 to v26.5.1). Megatron accepts some keys and then recomputes them; for those the key that has an effect is used, such as
`num_virtual_stages_per_pipeline_rank`. tools/check_primus.sh checks everything here against a checkout's own parser.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

import yaml

from tprimat.errors import ConfigError, LaunchError
from tprimat.plan.schema import RunPlan, Scalar

WORK_GROUP = "tprimat"
USER_NAME = "benchmark"
MODULE = "pre_trainer"

Value = Scalar | Sequence[Scalar]

RECOMPUTE: Mapping[str, tuple[str | None, str | None, int | None]] = {
    "none": (None, None, None),
    "selective": ("selective", None, None),
    "full": ("full", "uniform", 1),
}
"""Our setting -> granularity, method, layers. Megatron refuses full recomputation without a method."""

SAFE = re.compile(r"[\w./:@%+,=-]+")
"""run_pretrain.sh, and primus-cli at v0.5.0, pass their arguments through eval unquoted."""

MEASURING: Mapping[str, Value] = {
    "stderr_sink_level": "DEBUG",  # from v26.2 on the iteration lines are debug messages
    "log_interval": 1,
    "log_throughput": True,
    "log_avg_skip_iterations": 2,
    "log_avg_reset_interval": 50,
    "use_rocm_mem_info": False,  # rocm-smi in every iteration would be part of the time
    "use_rocm_mem_info_iters": [1, 2],
    "profile": False,
    "disable_tensorboard": True,
    "disable_wandb": True,
}
DATA: Mapping[str, Value] = {
    "mock_data": True,
    "train_data_path": None,
    "valid_data_path": None,
    "test_data_path": None,
    "eval_iters": 0,
}
NO_CHECKPOINTS: Mapping[str, Value] = {
    "finetune": False,
    "auto_continue_train": False,
    "load": None,
    "save": None,
    "disable_last_saving": True,
}


def settings(plan: RunPlan) -> dict[str, Value]:
    """Return the settings that the plan decides, for the experiment file and for the command line, which takes precedence.

    Raises:
        LaunchError: Primus cannot run the plan.
    """
    refuse_unsupported(plan)
    return {**_model(plan), **_layout(plan), **_batch(plan), **_optimizer(plan), **_arithmetic(plan)}


def _model(plan: RunPlan) -> dict[str, Value]:
    shape = plan.shape
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "group_query_attention": shape.kv_heads != shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
    }


def _layout(plan: RunPlan) -> dict[str, Value]:
    layout, options = plan.layout, plan.engine_options
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "num_virtual_stages_per_pipeline_rank": layout.virtual_pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": layout.sequence_parallel,
        "use_distributed_optimizer": options.distributed_optimizer,
        "overlap_grad_reduce": options.overlap_grad_reduce,
        "overlap_param_gather": options.overlap_param_gather and options.distributed_optimizer,
    }


def _batch(plan: RunPlan) -> dict[str, Value]:
    batch = plan.batch
    if isinstance(batch.micro_batch_sequences, str):
        raise LaunchError("Primus cannot search for a micro-batch that fits.", fix="--micro-batch-size 1")
    return {
        "micro_batch_size": batch.micro_batch_sequences,
        "global_batch_size": batch.global_batch_sequences,
        "seq_length": batch.sequence_tokens,
        "max_position_embeddings": batch.sequence_tokens,
        "train_iters": plan.steps,
        "seed": plan.seed,
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


def _arithmetic(plan: RunPlan) -> dict[str, Value]:
    granularity, method, layers = RECOMPUTE[plan.recompute]
    return {
        "bf16": plan.precision != "fp32",
        "fp16": False,
        "fp8": "hybrid" if plan.precision == "fp8" else None,
        "recompute_granularity": granularity,
        "recompute_method": method,
        "recompute_num_layers": layers,
    }


def refuse_unsupported(plan: RunPlan) -> None:
    """Refuse what has no counterpart in Primus, before anything is written.

    Raises:
        LaunchError: names the setting and the fix.
    """
    if plan.primus_config is None:
        where = f"models.{plan.model}.primus_config"
        raise LaunchError(f"The model {plan.model} has no Primus model file.", where=where, fix=f"{where}: llama3.1_8B")
    if plan.size != "full":
        why = "Its vocabulary comes from the published tokenizer; TPrimat's small model has another one."
        raise LaunchError("Primus trains the full model only.", where="--size", why=why, fix="--size full, or --engine megatron")
    if plan.dataset != "mock":
        raise LaunchError(f"The engine primus trains on mock data, not on {plan.dataset}.", where="--data", fix="--data mock")
    if plan.profiling.enabled:
        raise LaunchError("The engine primus does not profile.", where="profiling.enabled", fix="--engine megatron")


def experiment(plan: RunPlan) -> dict[str, object]:
    """Return the whole experiment file. What the plan does not decide keeps the value of Primus's preset for the model.

    Raises:
        ConfigError: an additional key contradicts the plan or has no effect.
    """
    decided: dict[str, Value] = {**settings(plan), **DATA, **NO_CHECKPOINTS, **MEASURING}
    additional = plan.primus.overrides if plan.primus else {}
    for key in additional:
        refuse_key(key, decided)
    module = {
        "framework": "megatron",
        "config": "pre_trainer.yaml",
        "model": f"{plan.primus_config}.yaml",
        "overrides": {**decided, **additional},
    }
    return {
        "work_group": WORK_GROUP,
        "user_name": USER_NAME,
        "exp_name": plan.run_id,
        "workspace": str(workspace(plan)),
        "modules": {MODULE: module},
    }


INSTEAD: Mapping[str, str] = {
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size in the strategy of parallelism",
    "data_parallel_size": "--gpus; the data-parallel degree is what is left over",
    "world_size": "--gpus",
    "padded_vocab_size": "make_vocab_size_divisible_by",
    "consumed_train_samples": "nothing; a benchmark starts at its first step",
}
"""Keys that Megatron's validate_args always overwrites -> what to set instead."""


def refuse_key(key: str, decided: Mapping[str, Value]) -> None:
    """Refuse a user's key that the plan decides already or that has no effect.

    Raises:
        ConfigError: either of these.
    """
    where = f"platform_optimizations.amd.primus.overrides.{key}"
    if key in decided:
        why = "One setting in two places could contradict itself."
        raise ConfigError(f"{key} is decided by the plan.", where=where, why=why, fix="the flag or the key of config.yaml")
    if key in INSTEAD:
        raise ConfigError(f"{key} has no effect in Primus.", where=where, why="Megatron computes it anew.", fix=INSTEAD[key])


def experiment_text(plan: RunPlan) -> str:
    """Return the experiment file as text. PyYAML writes every float with a dot; it would read 1e-05 back as a string."""
    heading = f"# The experiment of run {plan.run_id}, generated from plan.json beside it.\n"
    return heading + yaml.safe_dump(experiment(plan), sort_keys=False, width=200)


def overrides(plan: RunPlan) -> tuple[str, ...]:
    """Return the plan's settings as pairs of arguments: the core runtime of v0.7.0 keeps the dashes of '--key=value'.

    None appears in the experiment only: v0.6.0 to v26.2 read the word None as text.
    """
    given = ((key, value) for key, value in settings(plan).items() if value is not None)
    return tuple(text for key, value in given for text in (f"--{key}", word(value)))


def word(value: Value) -> str:
    """Format a value so that all of Primus's parsers read it back.

    v0.2.0 to v0.5.0 evaluate Python, so booleans are True and False; later versions require a dot in a float.
    """
    if isinstance(value, float):
        text = repr(value)
        mantissa, exponent, power = text.partition("e")
        return text if "." in mantissa else f"{mantissa}.0{exponent}{power}"
    return str(value)


def workspace(plan: RunPlan) -> PurePath:
    """Return the folder for Primus's own output."""
    return PurePath(plan.run_directory) / "primus"


def rank_error_logs(plan: RunPlan) -> str:
    """Return the glob pattern of all ranks' tracebacks; primus-cli hides those of most ranks from the console."""
    folder = workspace(plan) / WORK_GROUP / USER_NAME / plan.run_id
    return str(folder / "logs" / MODULE / "rank-*" / "error.log")
