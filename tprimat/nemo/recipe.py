"""RunPlan -> NeMo 2 pre-training recipe, by one function for every model that has a recipe.

Fields are set on the recipe's own configuration, so that its overlap of communication, precision plugin and callbacks stay.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import nemo_run
import torch
from nemo.collections import llm
from nemo.collections.common.tokenizers.null_tokenizer import NullTokenizer
from nemo.collections.llm.gpt.data.mock import MockDataModule
from nemo.collections.llm.recipes.precision import mixed_precision
from nemo.lightning.pytorch.optim import lr_scheduler
from nemo.lightning.pytorch.plugins import MegatronMixedPrecision

from tprimat.core.errors import LaunchError
from tprimat.core.models import ModelShape
from tprimat.core.rows import DATA, document, placed
from tprimat.engines.nemo import INSTALL
from tprimat.plan import megatron_names as names
from tprimat.plan.schema import RunPlan

RECIPES = "nemo.collections.llm.recipes"
LOADER_WORKERS = 2
"""For mock data: NeMo's default of 8 a rank is more processes than small machines have cores."""
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32}
"""Precision -> dtype of weights and of messages between pipeline stages."""


def build_recipe(plan: RunPlan, callbacks: Sequence[Any] = ()) -> Any:
    """Build the recipe of a plan, a nemo_run.Partial, with further callbacks of Lightning after its own."""
    recipe = pretrain_recipe(plan)(
        name="nemo", dir=plan.run_directory, num_nodes=plan.nodes, num_gpus_per_node=plan.gpus_per_node
    )
    recipe.trainer.plugins = _precision(plan)
    strategy, layout = recipe.trainer.strategy, plan.workload.layout
    names.set_fields(strategy, names.layout_fields(layout))
    strategy.expert_tensor_parallel_size = 1 if layout.expert > 1 else None  # see plan/megatron_names.py
    strategy.pipeline_dtype = DTYPES[plan.workload.matmul_dtype] if layout.pipeline > 1 else None
    _set_model(recipe.model.config, plan)
    if plan.nemo.cross_entropy_fusion_impl is not None:
        recipe.model.config.cross_entropy_loss_fusion = True
        recipe.model.config.cross_entropy_fusion_impl = plan.nemo.cross_entropy_fusion_impl
    if plan.nemo.first_last_layers_bf16 is not None:
        recipe.trainer.plugins.first_last_layers_bf16 = plan.nemo.first_last_layers_bf16
    _set_data(recipe, plan)
    _set_optimizer(recipe.optim, plan)
    _set_trainer(recipe, plan, callbacks)
    return recipe


def pretrain_recipe(plan: RunPlan) -> Any:
    """Return the function `pretrain_recipe` of a NeMo recipe, such as llama31_8b: llm only logs it where one fails to import."""
    name = str(plan.nemo_recipe)
    try:
        module = getattr(llm, name, None) or import_module(f"{RECIPES}.{name}")
    except ImportError as error:
        what = f"NeMo's recipe {name} cannot be imported: {error}."
        raise LaunchError(what, where=f"models.{plan.model}.nemo_recipe", fix=INSTALL) from error
    return module.pretrain_recipe


def model_fields(shape: ModelShape) -> dict[str, Any]:
    """Return a shape in the names of NeMo's model configuration. For a recipe's own model these change nothing (tested)."""
    fields = names.recipe_fields(shape)
    if shape.rope_scaling is not None:
        fields |= placed("megatron_names.nemo_scaling", scaling=shape.rope_scaling)
    return fields


def _precision(plan: RunPlan) -> Any:
    if plan.workload.matmul_dtype == "fp8":
        if plan.engine_options.fp8_scaling == "current":
            return mixed_precision.bf16_with_fp8_current_scaling_mixed()
        return mixed_precision.bf16_with_fp8_mixed()
    if plan.workload.matmul_dtype == "bf16":
        return mixed_precision.bf16_mixed()
    return nemo_run.Config(
        MegatronMixedPrecision, precision="32", params_dtype=torch.float32, pipeline_dtype=torch.float32, autocast_enabled=False
    )


def _set_model(config: Any, plan: RunPlan) -> None:
    work = plan.workload
    names.set_fields(config, {**model_fields(work.shape), **names.routing_fields(work), **names.recompute_fields(work)})
    config.seq_length = work.sequence_tokens
    if work.shape.experts:
        config.moe_aux_loss_coeff = work.shape.balance_loss
    if work.layout.virtual_pipeline is not None:
        # As Megatron-LM does: with the plain recipes' exchange in batches, Megatron-Core 0.15.3 hands wrong activations on
        # between the chunks of a rank (tests/nemo_recipes/test_nemo_training.py).
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False


def _set_data(recipe: Any, plan: RunPlan) -> None:
    # A tokenizer that downloads nothing; NullTokenizer adds one token to the number that it is given.
    tokenizer = nemo_run.Config(NullTokenizer, vocab_size=plan.workload.shape.vocabulary - 1)
    recipe.data = nemo_run.Config(
        MockDataModule,
        seq_length=plan.workload.sequence_tokens,
        micro_batch_size=plan.workload.micro_batch_sequences,
        global_batch_size=plan.workload.global_batch_sequences,
        tokenizer=tokenizer,
        num_workers=LOADER_WORKERS,
        pin_memory=True,
    )
    recipe.model.tokenizer = tokenizer


def _set_optimizer(optim: Any, plan: RunPlan) -> None:
    settings, config = plan.optimizer, optim.config
    names.set_fields(config, names.optimizer_fields(settings))
    config.bf16 = plan.workload.matmul_dtype != "fp32"
    if settings.schedule == "cosine":
        scheduler = nemo_run.Config(lr_scheduler.CosineAnnealingScheduler, constant_steps=0, min_lr=settings.min_learning_rate)
    else:
        scheduler = nemo_run.Config(lr_scheduler.WarmupPolicyScheduler)
    scheduler.warmup_steps, scheduler.max_steps = names.warmup_steps(plan), plan.steps
    optim.lr_scheduler = scheduler


def _set_trainer(recipe: Any, plan: RunPlan, callbacks: Sequence[Any]) -> None:
    trainer = recipe.trainer
    trainer.max_steps = plan.steps
    trainer.callbacks = [*(getattr(trainer, "callbacks", None) or []), *callbacks]
    settings = document(DATA / "framework_settings.yaml")["nemo"]
    names.set_fields(trainer, settings["trainer"])
    names.set_fields(recipe.log, settings["log"])
    recipe.resume = None
    recipe.log.explicit_log_dir = str(Path(plan.run_directory) / "nemo")
