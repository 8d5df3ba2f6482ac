"""RunPlan -> NeMo 2 pre-training recipe: one function for every model that has one.

Fields are set on what the recipe brings, so that its own overlap of communication, precision plugin and callbacks stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch
import nemo_run
import torch
from nemo.collections.common.tokenizers.null_tokenizer import NullTokenizer
from nemo.collections.llm.gpt.data.mock import MockDataModule, _MockGPTDataset
from nemo.collections.llm.recipes.precision import mixed_precision
from nemo.core.optim.lr_scheduler import PolynomialDecayAnnealing
from nemo.lightning import megatron_init
from nemo.lightning.pytorch.optim import lr_scheduler
from nemo.lightning.pytorch.optim.base import LRSchedulerModule
from nemo.lightning.pytorch.plugins import MegatronMixedPrecision

from tprimat.engines.nemo import LAYERS, OTHER_ENGINE, inexpressible, without_transformer_engine
from tprimat.errors import LaunchError
from tprimat.facts.models import ModelShape
from tprimat.nemo.availability import pretrain_recipe
from tprimat.nemo.data import SequencesModule
from tprimat.nemo.layers import torch_settings
from tprimat.plan.schema import RunPlan

# A model's shape in the names of NeMo's model configuration, and what of a recipe's model a shape must agree with.

KIND = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "qk_layernorm": False,
    "num_moe_experts": None,
    "multi_latent_attention": False,
    "layernorm_zero_centered_gamma": False,
}
"""Fields that a shape must have to be set by `model_fields` alone; engines/nemo.py refuses other shapes."""
ACTIVATION = "silu"


def check_kind(config: Any, plan: RunPlan) -> None:
    """Whether a recipe's model is of the kind that shapes are made into.

    Raises:
        LaunchError: it has other layers than the plan's shape says; names the first field that differs.
    """
    found = [(name, getattr(config, name, wanted), wanted) for name, wanted in KIND.items()]
    found.append(("activation_func", getattr(config.activation_func, "__name__", None), ACTIVATION))
    for name, value, wanted in found:
        if value != wanted:
            what = f"NeMo's recipe {plan.nemo_recipe} builds another kind of model than {plan.shape.name}: {name} is {value}."
            raise LaunchError(
                what, where=f"models.{plan.model}.nemo_recipe", why=LAYERS, fix=f"another recipe, or {OTHER_ENGINE}"
            )
    if hasattr(config, "scale_factor") != (plan.shape.rope_scaling is not None):
        what = f"NeMo's recipe {plan.nemo_recipe} treats rotary frequencies otherwise than {plan.shape.name}."
        raise LaunchError(what, where=f"models.{plan.model}.nemo_recipe", fix=f"another recipe, or {OTHER_ENGINE}")


def model_fields(shape: ModelShape) -> dict[str, Any]:
    """A shape in the names of NeMo's model configuration. For a recipe's own model this changes nothing (a test says so)."""
    fields = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_epsilon,
        "add_qkv_bias": shape.qkv_bias,
        "rotary_base": shape.rope_base,
        "share_embeddings_and_output_weights": shape.tied_embeddings,
        "vocab_size": shape.vocabulary,
    }
    if shape.rope_scaling is not None:
        scaling = shape.rope_scaling
        fields |= {
            "scale_factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "old_context_len": scaling.original_context_tokens,
        }
    return fields


# The linear schedule for NeMo, whose own PolynomialDecayAnnealingScheduler takes no warm-up.


class LinearScheduler(LRSchedulerModule):  # type: ignore[misc]
    """Warm-up, then a straight line down to `min_lr` at `max_steps`."""

    def __init__(self, warmup_steps: int, max_steps: int, min_lr: float) -> None:
        super().__init__()
        self.warmup_steps = warmup_steps
        self.max_steps = max_steps
        self.min_lr = min_lr

    def scheduler(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """What Lightning wants of configure_optimizers."""
        del model
        made = PolynomialDecayAnnealing(
            optimizer, max_steps=self.max_steps, warmup_steps=self.warmup_steps, min_lr=self.min_lr, power=1.0
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": made, "interval": "step", "frequency": 1},
            "monitor": "val_loss",
        }


# The plan's seed where NeMo has constants: 1234 for the weights (megatron_init), 0 or 1 for mock data.


class Seeds(lightning.pytorch.Callback):  # type: ignore[misc]
    """Seeds Python, numpy, torch and Megatron's generators from the plan, on each pipeline stage its own.

    NeMo seeds them with 1234 when it has set up the ranks, with no way to say another number. Lightning calls `setup` after
    that and before the model is built.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before the weights are drawn."""
        del trainer, pl_module, stage
        megatron_init._set_random_seed(self.seed)


class SeededMockData(MockDataModule):  # type: ignore[misc]
    """NeMo's mock data, each seed with sequences of its own.

    NeMo's module hands its datasets `create_attention_mask` in the place of the seed: every run has the same data.

    Args:
        seed: of the plan.
        settings: of MockDataModule.
    """

    def __init__(self, *, seed: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.seed = seed

    def setup(self, stage: str = "") -> None:
        """The training data; a benchmark neither validates nor tests."""
        del stage
        # Item i is drawn from seed + i: seeds a data set apart share none.
        first = self.seed * self.num_train_samples
        self._train_ds = _MockGPTDataset(self.tokenizer, "train", self.num_train_samples, self.seq_length, seed=first)
        self._validation_ds = self._test_ds = self._train_ds


# RunPlan -> NeMo 2 pre-training recipe: one function for every model that has one.
#
# Fields are set on what the recipe brings, so that its own overlap of communication, precision plugin and callbacks stay.

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
    if unfit := inexpressible(plan):
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
