"""Norm and clipping of many gradients in a few kernels, without Transformer Engine and Apex.

Megatron-Core's own fallback asks the device for the norm of each tensor, one by one (`torch.tensor` of a list of device
scalars), and scales each into a temporary. `l2_norm` and `scale` take its place under the same interface. An optimizer that clips
while it updates needs neither Megatron's scaling nor the norm on the host: `norm_over_ranks` and `clipping_factor`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from tprimat.megatron.compiled_adamw import CompiledAdamW
from tprimat.megatron.model import PARAMETER_DTYPES
from tprimat.megatron.options import ActiveOptions
from tprimat.plan.schema import RunPlan

NOTHING = torch.empty(0)


def l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool, *_: Any
) -> tuple[Tensor, None]:
    """Of all tensors together, shape (1,), fp32, on their device; nothing waits for it.

    Args:
        chunk_size: unused, the interface's.
        noop_flag: unused, the interface's.
        tensor_lists: one list of gradients.
        per_tensor: unused: Megatron never asks for it.

    Returns:
        the norm, and None for the norms of each.
    """
    del chunk_size, noop_flag, per_tensor
    norms = torch._foreach_norm(tensor_lists[0], 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], factor: float) -> None:
    """Multiply in place: both lists are the same gradients."""
    del chunk_size, noop_flag
    sources, targets = tensor_lists
    if any(
        source is not target and source.data_ptr() != target.data_ptr() for source, target in zip(sources, targets, strict=True)
    ):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)


def install() -> None:
    """Replace Megatron's fallbacks; where Transformer Engine or Apex brings kernels of its own, those stay."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl in (utils.local_multi_tensor_l2_norm, l2_norm):  # or ours from an earlier training
        clip_grads.l2_norm_impl = l2_norm
        clip_grads.multi_tensor_scale_impl = scale


def norm_over_ranks(optimizers: Sequence[Any]) -> Tensor:
    """Of all gradients of the model together, shape (1,), fp32, on their device; as Megatron takes it, but nothing waits for it.

    Args:
        optimizers: Megatron's, which know their gradients and the ranks that hold others.
    """
    squares = []
    for optimizer in optimizers:
        gradients = optimizer.get_main_grads_for_grad_norm()
        # A stage may have no gradient that counts, and its ranks still take part in the sum.
        norm = l2_norm(0, NOTHING, [gradients], False)[0] if gradients else torch.zeros(1, device=torch.cuda.current_device())
        square = norm.square()
        dist.all_reduce(square, group=optimizer.get_grad_stats_parallel_group())
        squares.append(square)
    return torch.stack(squares).sum(dim=0).sqrt()


def clipping_factor(norm: Tensor, largest: float) -> Tensor:
    """What gradients of this norm are multiplied with, shape as norm: 1 up to the largest norm, and for one that is no number.

    Args:
        norm: fp32.
        largest: 0 never clips.
    """
    factor = largest / (norm + 1e-6)
    return torch.where(factor < 1.0, factor, 1.0) if largest > 0 else torch.ones_like(norm)


# Megatron's mixed-precision optimizer behind torch's interface, so that Lightning counts its steps.


class MegatronOptimizer(torch.optim.Optimizer):
    """AdamW with fp32 master weights (sharded over replicas where asked), gradient clipping and the schedule."""

    def __init__(self, chunks: list[MegatronModule], plan: RunPlan, options: ActiveOptions) -> None:
        settings = plan.optimizer
        dtype = PARAMETER_DTYPES[plan.precision]
        install()
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
        norm = norm_over_ranks(self.parts)
        factor = clipping_factor(norm, self.megatron.config.clip_grad)
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
