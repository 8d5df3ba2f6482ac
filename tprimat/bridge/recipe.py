"""RunPlan -> Megatron-Bridge's ConfigContainer: one of its recipes, with the plan's model, layout, batch and schedule set on it.

A recipe asks Hugging Face's hub for its model. Here it gets the usual one of its kind instead, so that no run needs the hub; the
plan sets every dimension afterwards.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from megatron.bridge import AutoBridge
from megatron.bridge.training import mixed_precision
from torch import Tensor
from torch.utils.data import Dataset

from tprimat.core.errors import LaunchError
from tprimat.core.models import ModelShape
from tprimat.engines.bridge import PLAIN, model_kind, recipe_name
from tprimat.plan import megatron_names as names
from tprimat.plan.schema import RunPlan
from tprimat.train.data import Sequences, open_sequences

DATASETS: Any = import_module(f"megatron.bridge.{'data.base' if find_spec('megatron.bridge.data.base') else 'training.config'}")
"""The module with DatasetProvider: the first since Bridge 0.6."""


def build_config(plan: RunPlan) -> Any:
    """Return the ConfigContainer that trains a plan. Raises LaunchError: this Bridge has no such recipe."""
    cfg, layout = recipe_of(plan), plan.workload.layout
    _set_model(cfg.model, plan)
    cfg.mixed_precision = _precision(plan, cfg)
    _set_training(cfg, plan)
    _set_optimizer(cfg, plan)
    overlaps = layout.expert > 1 and (layout.pipeline == 1 or layout.virtual_pipeline) and plan.workload.recompute != "full"
    if cfg.comm_overlap is not None and not overlaps:  # what Bridge asserts
        cfg.comm_overlap.overlap_moe_expert_parallel_comm = cfg.comm_overlap.delay_wgrad_compute = False
    if cfg.model.moe_token_dispatcher_type == "flex" and find_spec("deep_ep") is None:
        exchange_tokens_by_nccl(cfg.model)
    return cfg


def recipe_of(plan: RunPlan) -> Any:
    """Return the container of the plan's recipe as Bridge makes it, but for the dimensions of the model."""
    module, _, function = recipe_name(plan).partition(":")
    try:
        recipe = getattr(import_module(f"megatron.bridge.{module}"), function)
    except (ImportError, AttributeError) as error:
        where = f"platform_optimizations.{plan.platform}.bridge.recipe"
        what = f"This Megatron-Bridge has no recipe {module}:{function}."
        raise LaunchError(what, where=where, why=str(error), fix="recipe: null, or one that its folder has") from error
    kind = getattr(transformers, PLAIN["configs"][model_kind(plan.workload.shape)])
    usual = kind(architectures=[kind.__name__.replace("Config", "ForCausalLM")])  # by which Bridge finds its own
    AutoBridge.from_hf_pretrained = lambda *_, **__: AutoBridge.from_hf_config(usual)
    return recipe()


def model_fields(shape: ModelShape) -> dict[str, Any]:
    """Return a shape in the names of Megatron-Core's TransformerConfig and of Bridge's provider."""
    fields = {
        **names.recipe_fields(shape),
        **names.router_fields(shape),
        "qk_layernorm": shape.qk_norm,
        "should_pad_vocab": True,
        "rope_scaling": shape.rope_scaling is not None,
    }
    if shape.rope_scaling is not None:
        fields["rope_scaling_factor"] = shape.rope_scaling.factor
    return fields


def _set_model(model: Any, plan: RunPlan) -> None:
    work = plan.workload
    layout = names.layout_fields(work.layout)
    names.set_fields(model, model_fields(work.shape) | layout | names.routing_fields(work) | names.recompute_fields(work))
    model.pipeline_model_parallel_layout = None
    model.expert_tensor_parallel_size = 1 if work.shape.experts else None
    wide = work.matmul_dtype == "fp32"
    model.pipeline_dtype = None if work.layout.pipeline == 1 else torch.float32 if wide else torch.bfloat16
    model.seq_length = work.sequence_tokens


def _precision(plan: RunPlan, cfg: Any) -> Any:
    """Return Bridge's object for the plan's precision; how gradients are reduced stays as the recipe has it."""
    if plan.workload.matmul_dtype == "fp32":
        cfg.model.bf16, cfg.model.params_dtype = False, torch.float32
        return None
    asked = (plan.workload.fp8_scaling or plan.engine_options.fp8_scaling) if plan.workload.narrow else "bf16"
    former, precision = cfg.mixed_precision, mixed_precision.get_mixed_precision_config(PLAIN["precisions"][asked])
    if not isinstance(former, str) and former is not None:
        precision.grad_reduce_in_fp32 = former.grad_reduce_in_fp32
        if asked == "current":
            precision.first_last_layers_bf16 = former.first_last_layers_bf16
    return precision


def _set_training(cfg: Any, plan: RunPlan) -> None:
    work = plan.workload
    cfg.train.train_iters = plan.steps
    cfg.train.micro_batch_size, cfg.train.global_batch_size = work.micro_batch_sequences, work.global_batch_sequences
    for part, fields in PLAIN["settings"].items():
        names.set_fields(getattr(cfg, part), fields)
    cfg.rng.seed = plan.seed
    cfg.tokenizer.vocab_size = work.shape.vocabulary
    cfg.dataset = PlannedSequences(plan=plan, pin_memory=torch.cuda.is_available())


def _set_optimizer(cfg: Any, plan: RunPlan) -> None:
    settings, schedule = plan.optimizer, cfg.scheduler
    names.set_fields(cfg.optimizer, names.optimizer_fields(settings))
    schedule.start_weight_decay = schedule.end_weight_decay = settings.weight_decay
    schedule.lr_decay_style = settings.schedule
    schedule.lr_warmup_init = names.first_learning_rate(settings)
    schedule.lr_warmup_iters, schedule.lr_decay_iters = names.warmup_steps(plan), plan.steps


def exchange_tokens_by_nccl(model: Any) -> None:
    """Exchange the experts' tokens as Megatron-Core itself does: DeepEP and HybridEP are packages apart."""
    model.moe_token_dispatcher_type, model.moe_flex_dispatcher_backend = "alltoall", None


# The sequences of the embedded engine, in the same order.


@dataclass
class PlannedSequences(DATASETS.DatasetProvider):  # type: ignore[misc]
    """The plan's sequences behind Megatron's sampler, which gives each replica its micro-batches."""

    plan: RunPlan | None = None
    seq_length: int = 0
    description: str | None = None
    dataloader_type: str = "single"
    num_workers: int = 0
    persistent_workers: bool = False
    skip_getting_attention_mask_from_dataset: bool = True

    def __post_init__(self) -> None:
        assert self.plan is not None
        self.seq_length = self.plan.workload.sequence_tokens

    def build_datasets(self, context: Any) -> tuple[Any, None, None]:
        """Open the sequences; a benchmark neither validates nor tests."""
        del context
        assert self.plan is not None
        sequences = open_sequences(self.plan, self.plan.workload.shape.vocabulary)
        self.description = sequences.description
        return _Items(sequences, self.plan), None, None


class _Items(Dataset[dict[str, Tensor]]):
    """Sequences in the fields that Bridge's forward step reads."""

    def __init__(self, sequences: Sequences, plan: RunPlan) -> None:
        self.sequences = sequences
        self.count = plan.steps * plan.workload.global_batch_sequences
        self.loss_mask = torch.ones(plan.workload.sequence_tokens)
        self.position_ids = torch.arange(plan.workload.sequence_tokens)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self.sequences.sequence(index))
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": self.loss_mask, "position_ids": self.position_ids}
