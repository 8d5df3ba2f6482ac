"""Megatron's mixed-precision optimizer behind torch's interface, so that Lightning counts its steps."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from tprimat.plan.schema import RunPlan
from tprimat.train.megatron import gradient_norm
from tprimat.train.megatron.active_options import ActiveOptions
from tprimat.train.megatron.compiled_adam import CompiledAdamW
from tprimat.train.megatron.model import PARAMETER_DTYPES


class MegatronOptimizer(torch.optim.Optimizer):
    """AdamW with fp32 master weights (sharded over replicas where asked), gradient clipping and the schedule."""

    def __init__(self, chunks: list[MegatronModule], plan: RunPlan, options: ActiveOptions) -> None:
        settings = plan.optimizer
        dtype = PARAMETER_DTYPES[plan.precision]
        gradient_norm.install()
        self.megatron = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=settings.learning_rate,
                min_lr=settings.min_learning_rate,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.epsilon,
                clip_grad=settings.gradient_clipping,
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=options.distributed_optimizer,
                overlap_param_gather=options.overlap_param_gather,
            ),
            chunks,
            use_gloo_process_groups=False,
        )
        self.parts = getattr(self.megatron, "chained_optimizers", [self.megatron])
        self.grad_norm: Tensor | float | None = None
        """Before clipping; on the device where nothing has asked for it yet."""
        super().__init__([torch.zeros(1, requires_grad=True)], {"lr": settings.learning_rate})
        self.param_groups = self.megatron.param_groups
        self.compiled = self._compile() if options.compiled_adam else []
        for group in self.param_groups if options.fused_adam and not self.compiled else ():
            group["fused"], group["foreach"] = True, False
        self.scheduler = schedule_of(self.megatron, plan)

    def _compile(self) -> list[CompiledAdamW]:
        """Let the optimizers that Megatron has made step and clip in one pass; Transformer Engine's and Apex's stay."""
        inner = [part.optimizer for part in self.parts]
        if any(type(optimizer) is not torch.optim.AdamW for optimizer in inner):
            return []
        for optimizer in inner:
            optimizer.__class__ = CompiledAdamW
        return inner

    def scale_loss(self, loss: Tensor) -> Tensor:
        """What Megatron's schedule multiplies a loss with before the backward pass: nothing but fp16 needs more than 1."""
        return self.megatron.scale_loss(loss)  # type: ignore[no-any-return]

    @property
    def description(self) -> str:
        """The classes that really step, such as DistributedOptimizer over AdamW."""
        inner = self.parts[0]
        return f"{type(inner).__name__} over {type(inner.optimizer).__name__}"

    @property
    def learning_rate(self) -> float:
        """Of the step that comes next."""
        return float(self.param_groups[0]["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients."""
        self.megatron.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Clip, update, and move the schedule on."""
        if closure is not None:
            closure()
        self.grad_norm = self._step_unwatched() if self.compiled else self.megatron.step()[1]
        self.scheduler.step(increment=1)

    @torch.no_grad()
    def _step_unwatched(self) -> Tensor:
        """Megatron's step where the host never waits for the norm: it has launched the next step before this one is done.

        Gradients are not scaled for fp16 here, so that there is no overflow to ask the device for.
        """
        self.megatron.prepare_grads()
        norm = gradient_norm.norm_over_ranks(self.parts)
        factor = gradient_norm.clipping_factor(norm, self.megatron.config.clip_grad)
        for optimizer in self.compiled:
            optimizer.gradient_factor = factor
        self.megatron.step_with_ready_grads()
        return norm


def schedule_of(optimizer: Any, plan: RunPlan) -> OptimizerParamScheduler:
    """Megatron's schedule of learning rate and weight decay, over anything with param_groups."""
    settings = plan.optimizer
    # Megatron wants the warm-up to be shorter than the decay, however short the run is.
    decay = max(plan.steps, 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if settings.warmup_steps == 0 else settings.learning_rate / (settings.warmup_steps + 1),
        max_lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        lr_warmup_steps=min(settings.warmup_steps, decay - 1),
        lr_decay_steps=decay,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
