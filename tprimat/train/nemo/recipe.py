"""RunPlan -> NeMo 2 pre-training recipe: one function for every model that has one.

Fields are set on what the recipe brings, so that its own overlap of communication, precision plugin and callbacks stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nemo_run
import torch
from nemo.collections.common.tokenizers.null_tokenizer import NullTokenizer
from nemo.collections.llm.recipes.precision import mixed_precision
from nemo.lightning.pytorch.optim import lr_scheduler
from nemo.lightning.pytorch.plugins import MegatronMixedPrecision

from tprimat.plan.nemo import refusal, without_transformer_engine
from tprimat.plan.schema import RunPlan
from tprimat.train.nemo.availability import pretrain_recipe
from tprimat.train.nemo.data import SequencesModule
from tprimat.train.nemo.layers import torch_settings
from tprimat.train.nemo.model import check_kind, model_fields
from tprimat.train.nemo.schedule import LinearScheduler
from tprimat.train.nemo.seeds import SeededMockData

LOADER_WORKERS = 2
"""For mock data: NeMo's default of 8 a rank is more processes than small machines have cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a recipe has to adapt to on this machine."""

    on_gpu: bool
    transformer_engine: bool


def build_recipe(plan: RunPlan, here: Surroundings, callbacks: Sequence[Any] = ()) -> Any:
    """The recipe that carries out a plan.

    Args:
        plan: what to do.
        here: what this machine has.
        callbacks: Lightning callbacks, put behind the recipe's own.

    Returns:
        nemo_run.Partial of nemo.collections.llm.pretrain; fiddle.build makes the function that trains.

    Raises:
        LaunchError: NeMo has no such recipe, or this machine cannot run it so.
    """
    _refuse(plan, here)
    recipe = pretrain_recipe(plan.nemo_recipe, plan.model)(
        name="nemo", dir=plan.run_directory, num_nodes=plan.nodes, num_gpus_per_node=plan.gpus_per_node
    )
    check_kind(recipe.model.config, plan)
    recipe.trainer.plugins = _precision(plan)
    _set_parallelism(recipe.trainer.strategy, plan)
    _set_model(recipe.model.config, plan)
    _set_data(recipe, plan, here)
    _set_optimizer(recipe.optim, plan)
    _set_trainer(recipe, plan, callbacks)
    if not here.transformer_engine:
        for name, value in torch_settings(plan.shape).items():
            setattr(recipe.model.config, name, value)
    if not here.on_gpu:
        recipe.trainer.accelerator = "cpu"
        recipe.model.config.use_cpu_initialization = True
    return recipe


def _refuse(plan: RunPlan, here: Surroundings) -> None:
    if unfit := refusal(plan):
        raise unfit
    if not here.transformer_engine and (unfit := without_transformer_engine(plan)):
        raise unfit


def _set_parallelism(strategy: Any, plan: RunPlan) -> None:
    layout = plan.layout
    strategy.tensor_model_parallel_size = layout.tensor
    strategy.pipeline_model_parallel_size = layout.pipeline
    strategy.virtual_pipeline_model_parallel_size = layout.virtual_pipeline
    strategy.context_parallel_size = layout.context
    strategy.expert_model_parallel_size = layout.expert
    strategy.sequence_parallel = layout.sequence_parallel
    strategy.pipeline_dtype = DTYPES[plan.precision] if layout.pipeline > 1 else None


DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32}
"""Of weights and of what pipeline stages send each other."""


def _precision(plan: RunPlan) -> Any:
    """The precision plugin: it, not the model's configuration, has the last word on bf16 and fp8."""
    if plan.precision == "fp8":
        if plan.engine_options.fp8_scaling == "current":
            return mixed_precision.bf16_with_fp8_current_scaling_mixed()
        return mixed_precision.bf16_with_fp8_mixed()
    if plan.precision == "bf16":
        return mixed_precision.bf16_mixed()
    return nemo_run.Config(
        MegatronMixedPrecision, precision="32", params_dtype=torch.float32, pipeline_dtype=torch.float32, autocast_enabled=False
    )


def _set_model(config: Any, plan: RunPlan) -> None:
    for name, value in model_fields(plan.shape).items():
        setattr(config, name, value)
    config.seq_length = plan.batch.sequence_tokens
    if plan.recompute == "full":
        config.recompute_granularity = "full"
        config.recompute_method = "uniform"
        config.recompute_num_layers = 1
    else:
        config.recompute_granularity = None if plan.recompute == "none" else "selective"


def _set_data(recipe: Any, plan: RunPlan, here: Surroundings) -> None:
    if plan.dataset != "mock":
        recipe.data = nemo_run.Config(SequencesModule, plan=plan, pin_memory=here.on_gpu)
    else:
        recipe.data = nemo_run.Config(SeededMockData, seed=plan.seed)
    data = recipe.data
    data.seq_length = plan.batch.sequence_tokens
    data.micro_batch_size = plan.batch.micro_batch_sequences
    data.global_batch_size = plan.batch.global_batch_sequences
    # A tokenizer that downloads nothing; NullTokenizer adds one token to the number that it is given.
    tokenizer = nemo_run.Config(NullTokenizer, vocab_size=plan.shape.vocabulary - 1)
    recipe.model.tokenizer = data.tokenizer = tokenizer
    if plan.dataset == "mock":
        data.num_workers = LOADER_WORKERS if here.on_gpu else 0
        data.pin_memory = here.on_gpu


def _set_optimizer(optim: Any, plan: RunPlan) -> None:
    settings, config = plan.optimizer, optim.config
    config.lr = settings.learning_rate
    config.min_lr = settings.min_learning_rate
    config.weight_decay = settings.weight_decay
    config.adam_beta1 = settings.beta1
    config.adam_beta2 = settings.beta2
    config.adam_eps = settings.epsilon
    config.clip_grad = settings.gradient_clipping
    config.bf16 = plan.precision != "fp32"
    warmup = min(settings.warmup_steps, max(plan.steps - 1, 0))
    if settings.schedule == "cosine":
        made = nemo_run.Config(lr_scheduler.CosineAnnealingScheduler, constant_steps=0, min_lr=settings.min_learning_rate)
    elif settings.schedule == "linear":
        made = nemo_run.Config(LinearScheduler, min_lr=settings.min_learning_rate)
    else:
        made = nemo_run.Config(lr_scheduler.WarmupPolicyScheduler)
    made.warmup_steps, made.max_steps = warmup, plan.steps
    optim.lr_scheduler = made


def _set_trainer(recipe: Any, plan: RunPlan, callbacks: Sequence[Any]) -> None:
    trainer = recipe.trainer
    trainer.max_steps = plan.steps
    trainer.callbacks = [*(getattr(trainer, "callbacks", None) or []), *callbacks]
    trainer.limit_val_batches = 0
    trainer.limit_test_batches = 0
    trainer.num_sanity_val_steps = 0
    trainer.val_check_interval = None
    trainer.log_every_n_steps = 1
    trainer.enable_checkpointing = False
    trainer.enable_model_summary = False
    trainer.logger = False
    # NeMo's progress bar reads the loss in each step, and gathers Megatron's timers on rank 0 alone: an empty gather that
    # gloo counts all the same, after which the next collective of all ranks waits for ever.
    trainer.enable_progress_bar = False
    recipe.resume = None
    recipe.log.ckpt = None
    recipe.log.tensorboard = None
    recipe.log.wandb = None
    recipe.log.explicit_log_dir = str(Path(plan.run_directory) / "nemo")
    recipe.log.log_dir = None
