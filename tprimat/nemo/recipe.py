"""RunPlan -> NeMo 2 pre-training recipe, by one function for every model that has a recipe.

Fields are set on the recipe's own configuration, so that its overlap of communication, precision plugin and callbacks stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch
import nemo_run
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from nemo.collections.common.tokenizers.null_tokenizer import NullTokenizer
from nemo.collections.llm.gpt.data.mock import MockDataModule
from nemo.collections.llm.recipes.precision import mixed_precision
from nemo.core.optim.lr_scheduler import PolynomialDecayAnnealing
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback
from nemo.lightning.pytorch.optim import lr_scheduler
from nemo.lightning.pytorch.optim.base import LRSchedulerModule
from nemo.lightning.pytorch.plugins import MegatronDataSampler, MegatronMixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tprimat.core.errors import LaunchError
from tprimat.core.models import ModelShape
from tprimat.engines.nemo import LAYERS, OTHER_ENGINE, inexpressible, without_transformer_engine
from tprimat.megatron.layers import Parts, block_spec
from tprimat.nemo import compat
from tprimat.nemo.availability import pretrain_recipe
from tprimat.plan.schema import NemoOptions, RunPlan
from tprimat.train.data import Sequences, open_sequences


class SequencesModule(lightning.pytorch.LightningDataModule):  # type: ignore[misc]
    """The sequences of the embedded engine, in the same order, behind Megatron's sampler: each replica gets its micro-batches.

    NeMo requires a tokenizer of its data module; the text is already tokenized.
    """

    def __init__(  # noqa: PLR0913 - NeMo's recipes set these by name
        self, *, plan: RunPlan, tokenizer: Any, seq_length: int, micro_batch_size: int, global_batch_size: int, pin_memory: bool
    ) -> None:
        super().__init__()
        self.plan = plan
        self.tokenizer = tokenizer
        self.pin_memory = pin_memory
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.seq_length = seq_length
        self.description: str | None = None
        self.data_sampler = MegatronDataSampler(
            seq_len=seq_length, micro_batch_size=micro_batch_size, global_batch_size=global_batch_size
        )

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return a loader of single sequences; NeMo's strategy adds the sampler."""
        sequences = open_sequences(self.plan, self.plan.workload.shape.vocabulary)
        self.description = sequences.description
        return DataLoader(_Items(sequences, self.plan), pin_memory=self.pin_memory)


class _Items(Dataset[dict[str, Tensor]]):
    """Sequences in the fields that NeMo's GPT models read."""

    def __init__(self, sequences: Sequences, plan: RunPlan) -> None:
        self.sequences = sequences
        self.count = plan.steps * plan.workload.global_batch_sequences
        length = plan.workload.sequence_tokens
        self.loss_mask = torch.ones(length)
        self.position_ids = torch.arange(length)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self.sequences.sequence(index))
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": self.loss_mask,
            "position_ids": self.position_ids,
        }


# A model's shape in the names of NeMo's model configuration, and the fields in which a recipe's model must agree with it.

REQUIRED_FIELDS = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "multi_latent_attention": False,
    "layernorm_zero_centered_gamma": False,
}
"""Fields that a shape must have to be set by `model_fields` alone; engines/nemo.py refuses other shapes."""
ACTIVATION = "silu"


def check_model_kind(config: Any, plan: RunPlan) -> None:
    """Check that a recipe's model is of the kind that `model_fields` can describe.

    Raises:
        LaunchError: its layers differ from those of the plan's shape; names the first field that differs.
    """
    found = [(name, getattr(config, name, wanted), wanted) for name, wanted in REQUIRED_FIELDS.items()]
    found.append(("activation_func", getattr(config.activation_func, "__name__", None), ACTIVATION))
    # A recipe for heads with norms, or for experts, knows more about them than `model_fields` sets.
    found.append(("qk_layernorm", bool(getattr(config, "qk_layernorm", False)), plan.workload.shape.qk_norm))
    experts = getattr(config, "num_moe_experts", None)
    found.append(("num_moe_experts", experts, None if plan.workload.shape.experts is None else experts or "a number"))
    for name, value, wanted in found:
        if value != wanted:
            model = plan.workload.shape.name
            what = f"NeMo's recipe {plan.nemo_recipe} builds another kind of model than {model}: {name} is {value}."
            raise LaunchError(
                what, where=f"models.{plan.model}.nemo_recipe", why=LAYERS, fix=f"another recipe, or {OTHER_ENGINE}"
            )
    if hasattr(config, "scale_factor") != (plan.workload.shape.rope_scaling is not None):
        what = f"NeMo's recipe {plan.nemo_recipe} treats rotary frequencies differently from {plan.workload.shape.name}."
        raise LaunchError(what, where=f"models.{plan.model}.nemo_recipe", fix=f"another recipe, or {OTHER_ENGINE}")


def model_fields(shape: ModelShape) -> dict[str, Any]:
    """Return a shape in the names of NeMo's model configuration. For a recipe's own model these change nothing (tested)."""
    fields: dict[str, Any] = {
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
    if shape.experts is not None:
        fields |= {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.experts_per_token,
            "moe_ffn_hidden_size": shape.expert_ffn,
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


class LinearScheduler(LRSchedulerModule):  # type: ignore[misc]
    """Warm-up, then a straight line down to `min_lr` at `max_steps`; NeMo's own linear scheduler has no warm-up."""

    def __init__(self, warmup_steps: int, max_steps: int, min_lr: float) -> None:
        super().__init__()
        self.warmup_steps = warmup_steps
        self.max_steps = max_steps
        self.min_lr = min_lr

    def scheduler(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """Return what Lightning's configure_optimizers returns."""
        del model
        schedule = PolynomialDecayAnnealing(
            optimizer, max_steps=self.max_steps, warmup_steps=self.warmup_steps, min_lr=self.min_lr, power=1.0
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 1},
            "monitor": "val_loss",
        }


class Seeds(lightning.pytorch.Callback):  # type: ignore[misc]
    """Seeds Python, numpy, torch and Megatron's generators from the plan, differently on each pipeline stage.

    NeMo seeds them with the constant 1234 when it has set up the ranks. Lightning calls `setup` after that, before the model is
    built.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Seed before the weights are drawn."""
        del trainer, pl_module, stage
        compat.set_random_seed(self.seed)


class SeededMockData(MockDataModule):  # type: ignore[misc]
    """NeMo's mock data with different sequences for each seed.

    NeMo's module passes `create_attention_mask` in the place of the seed, so that every run has the same data.
    """

    def __init__(self, *, seed: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.seed = seed

    @property
    def description(self) -> str:
        """Name of the data, for the record."""
        return f"NeMo MockDataModule (seed {self.seed})"

    def setup(self, stage: str = "") -> None:
        """Create the training data; a benchmark neither validates nor tests."""
        del stage
        # Item i is drawn from seed + i: seeds that are one data set apart share no item.
        first = self.seed * self.num_train_samples
        dataset = compat.MockDataset(self.tokenizer, "train", self.num_train_samples, self.seq_length, seed=first)
        compat.set_mock_datasets(self, dataset)


# The recipe itself.

LOADER_WORKERS = 2
"""For mock data: NeMo's default of 8 a rank is more processes than small machines have cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The properties of this machine that a recipe must adapt to."""

    on_gpu: bool
    transformer_engine: bool
    accumulates_weight_gradients: bool = False
    """Whether a product can add to the fp32 buffer; see megatron/wgrad.py."""


def build_recipe(plan: RunPlan, here: Environment, callbacks: Sequence[Any] = ()) -> Any:
    """Build the recipe of a plan, with further callbacks of Lightning after its own.

    Returns:
        nemo_run.Partial of nemo.collections.llm.pretrain; fiddle.build makes the function that trains.

    Raises:
        LaunchError: NeMo has no such recipe, or cannot run this plan on this machine.
    """
    _refuse(plan, here)
    recipe = pretrain_recipe(plan.nemo_recipe, plan.model)(
        name="nemo", dir=plan.run_directory, num_nodes=plan.nodes, num_gpus_per_node=plan.gpus_per_node
    )
    check_model_kind(recipe.model.config, plan)
    recipe.trainer.plugins = _precision(plan)
    _set_parallelism(recipe.trainer.strategy, plan, here)
    _set_exchange_of_stages(recipe.model.config, plan)
    _set_options(recipe, plan.nemo)
    _set_model(recipe.model.config, plan)
    _set_data(recipe, plan, here)
    _set_optimizer(recipe.optim, plan)
    _set_trainer(recipe, plan, callbacks)
    if here.transformer_engine:
        recipe.model.config.gradient_accumulation_fusion = here.accumulates_weight_gradients
    else:
        for name, value in torch_settings(plan.workload.shape).items():
            setattr(recipe.model.config, name, value)
    if not here.on_gpu:
        recipe.trainer.accelerator = "cpu"
        recipe.model.config.use_cpu_initialization = True
    return recipe


def _refuse(plan: RunPlan, here: Environment) -> None:
    if unfit := inexpressible(plan):
        raise unfit
    if not here.transformer_engine and (unfit := without_transformer_engine(plan)):
        raise unfit


def _set_parallelism(strategy: Any, plan: RunPlan, here: Environment) -> None:
    layout = plan.workload.layout
    strategy.tensor_model_parallel_size = layout.tensor
    strategy.pipeline_model_parallel_size = layout.pipeline
    strategy.virtual_pipeline_model_parallel_size = layout.virtual_pipeline
    strategy.context_parallel_size = layout.context
    strategy.expert_model_parallel_size = layout.expert
    # See engines/primus.py; our own layers, in place of Transformer Engine's, have whole experts only.
    whole = plan.workload.shape.experts and (layout.expert > 1 or not here.transformer_engine)
    strategy.expert_tensor_parallel_size = 1 if whole else None
    strategy.sequence_parallel = layout.sequence_parallel
    strategy.pipeline_dtype = DTYPES[plan.workload.matmul_dtype] if layout.pipeline > 1 else None


def _set_exchange_of_stages(config: Any, plan: RunPlan) -> None:
    """Exchange between virtual stages as Megatron-LM and NVIDIA's tuned recipes do.

    With the plain recipes' exchange in batches, Megatron-Core 0.15.3 hands wrong activations on between the chunks of a rank
    (tests/nemo_recipes/test_nemo_training.py).
    """
    if plan.workload.layout.virtual_pipeline is not None:
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False


def _set_options(recipe: Any, options: NemoOptions) -> None:
    """Set what the user wants otherwise than the recipe has it; None leaves the recipe's own."""
    config, strategy = recipe.model.config, recipe.trainer.strategy
    if options.cross_entropy_fusion_impl is not None:
        config.cross_entropy_loss_fusion = True
        config.cross_entropy_fusion_impl = options.cross_entropy_fusion_impl
    if options.cuda_graph_impl is not None:
        # Not the older enable_cuda_graph: NeMo calls __post_init__ a second time, which refuses what the first made of it.
        config.cuda_graph_impl = options.cuda_graph_impl
        config.use_te_rng_tracker = strategy.use_te_rng_tracker = options.cuda_graph_impl != "none"
    given = {
        name: value
        for name in ("grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather")
        if (value := getattr(options, name)) is not None
    }
    if given and isinstance(getattr(strategy, "ddp", ""), str):  # a word for NeMo's default
        strategy.ddp = nemo_run.Config(DistributedDataParallelConfig, check_for_nan_in_grad=True)
    for name, value in given.items():
        setattr(strategy.ddp, name, value)
    if options.overlap_param_gather is not None:
        recipe.optim.config.overlap_param_gather = options.overlap_param_gather
    for name in ("grad_reduce_in_fp32", "first_last_layers_bf16"):
        if getattr(options, name) is not None:
            setattr(recipe.trainer.plugins, name, getattr(options, name))


def _overlap_of_tensor_ranks(strategy: Any) -> Any:
    """Return NeMo's callback for it. It would choose the overlap of replicas as well, so it is told what the strategy has."""
    ddp = getattr(strategy, "ddp", None)
    kept = {name: bool(getattr(ddp, name, False)) for name in ("overlap_grad_reduce", "overlap_param_gather")}
    return nemo_run.Config(MegatronCommOverlapCallback, tp_comm_overlap=True, **kept)


DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32}
"""Precision -> dtype of weights and of messages between pipeline stages."""


def _precision(plan: RunPlan) -> Any:
    """Return the precision plugin, which overrides the model's configuration of bf16 and fp8."""
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
    for name, value in model_fields(plan.workload.shape).items():
        setattr(config, name, value)
    config.seq_length = plan.workload.sequence_tokens
    if plan.workload.shape.experts:
        config.moe_router_force_load_balancing = plan.workload.routing == "balanced"
        config.moe_expert_capacity_factor = plan.workload.expert_capacity_factor
        config.moe_aux_loss_coeff = plan.workload.shape.balance_loss
    if plan.workload.recompute == "full":
        config.recompute_granularity = "full"
        config.recompute_method = "uniform" if plan.workload.recompute_layers is None else "block"
        config.recompute_num_layers = plan.workload.recompute_layers or 1
    else:
        config.recompute_granularity = None if plan.workload.recompute == "none" else "selective"
        config.recompute_modules = list(plan.workload.recompute_modules or ()) or None


def _set_data(recipe: Any, plan: RunPlan, here: Environment) -> None:
    if plan.dataset != "mock":
        recipe.data = nemo_run.Config(SequencesModule, plan=plan, pin_memory=here.on_gpu)
    else:
        recipe.data = nemo_run.Config(SeededMockData, seed=plan.seed)
    data = recipe.data
    data.seq_length = plan.workload.sequence_tokens
    data.micro_batch_size = plan.workload.micro_batch_sequences
    data.global_batch_size = plan.workload.global_batch_sequences
    # A tokenizer that downloads nothing; NullTokenizer adds one token to the number that it is given.
    tokenizer = nemo_run.Config(NullTokenizer, vocab_size=plan.workload.shape.vocabulary - 1)
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
    config.bf16 = plan.workload.matmul_dtype != "fp32"
    warmup = min(settings.warmup_steps, max(plan.steps - 1, 0))
    if settings.schedule == "cosine":
        scheduler = nemo_run.Config(lr_scheduler.CosineAnnealingScheduler, constant_steps=0, min_lr=settings.min_learning_rate)
    elif settings.schedule == "linear":
        scheduler = nemo_run.Config(LinearScheduler, min_lr=settings.min_learning_rate)
    else:
        scheduler = nemo_run.Config(lr_scheduler.WarmupPolicyScheduler)
    scheduler.warmup_steps, scheduler.max_steps = warmup, plan.steps
    optim.lr_scheduler = scheduler


def _set_trainer(recipe: Any, plan: RunPlan, callbacks: Sequence[Any]) -> None:
    trainer = recipe.trainer
    trainer.max_steps = plan.steps
    overlap = [_overlap_of_tensor_ranks(trainer.strategy)] if plan.nemo.tp_comm_overlap else []
    trainer.callbacks = [*(getattr(trainer, "callbacks", None) or []), *overlap, *callbacks]
    trainer.limit_val_batches = 0
    trainer.limit_test_batches = 0
    trainer.num_sanity_val_steps = 0
    trainer.val_check_interval = None
    trainer.log_every_n_steps = 1
    trainer.enable_checkpointing = False
    trainer.enable_model_summary = False
    trainer.logger = False
    # NeMo's progress bar reads the loss in each step, and gathers Megatron's timers on rank 0 alone. gloo counts this empty
    # gather, and the next collective of all ranks then waits forever.
    trainer.enable_progress_bar = False
    recipe.resume = None
    recipe.log.ckpt = None
    recipe.log.tensorboard = None
    recipe.log.wandb = None
    recipe.log.explicit_log_dir = str(Path(plan.run_directory) / "nemo")
    recipe.log.log_dir = None


# Without Transformer Engine: Megatron-Core's local layers, and a forward step.


@dataclass(frozen=True, slots=True)
class TorchBlockSpec:
    """The embedded engine's layers (torch's norm and attention) for a NeMo model."""

    shape: ModelShape

    def __call__(self, config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        """Return the layers of one pipeline stage; NeMo passes arguments by these names."""
        return block_spec(config, self.shape, vp_stage, Parts())


def forward_step(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Run the model causally without a mask, for which NeMo's own step requires Transformer Engine."""
    return model(  # type: ignore[no-any-return]
        input_ids=batch["tokens"], position_ids=batch["position_ids"], labels=batch["labels"], attention_mask=None
    )


def torch_settings(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of NeMo's model configuration that would need kernels of Transformer Engine or Apex."""
    return {
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        **({"moe_permute_fusion": False, "moe_grouped_gemm": False} if shape.experts else {}),
        "transformer_layer_spec": TorchBlockSpec(shape),
        "forward_step_fn": forward_step,
    }
