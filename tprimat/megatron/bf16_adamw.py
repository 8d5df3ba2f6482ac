"""AdamW whose gradients and moments have the weights' own dtype: 8 bytes a weight in bf16, where fp32 masters take 18.

For one rank alone, so that a GPU can hold the whole training of a model which fp32 states would not fit. A bf16 weight has
eight bits of fraction, and smaller updates than that are lost: it measures speed, it is no way to train.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from tprimat.megatron import optimizer
from tprimat.megatron.optimizer import schedule_of
from tprimat.plan.schema import RunPlan


class LeanOptimizer(torch.optim.Optimizer):
    """torch.optim.AdamW on the weights themselves, fed from Megatron's gradient buffer."""

    def __init__(self, chunks: list[MegatronModule], plan: RunPlan, *, fused: bool) -> None:
        settings = plan.optimizer
        weights = [parameter for chunk in chunks for parameter in chunk.parameters()]
        matrices, vectors = ([weight for weight in weights if (weight.dim() > 1) is matrix] for matrix in (True, False))
        self.adam = torch.optim.AdamW(
            [{"params": matrices, "wd_mult": 1.0}, {"params": vectors, "wd_mult": 0.0}],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=fused,
        )
        self.grad_norm: float | None = None
        self.clipping = settings.gradient_clipping
        super().__init__([torch.zeros(1, requires_grad=True)], {"lr": settings.learning_rate})
        self.param_groups = self.adam.param_groups
        self.scheduler = schedule_of(self.adam, plan)

    @property
    def description(self) -> str:
        """With the dtype of its moments, once there are some."""
        states = next((state["exp_avg"] for state in self.adam.state.values()), None)
        dtype = "" if states is None else f", states {str(states.dtype).removeprefix('torch.')}"
        return f"{type(self.adam).__name__} without master weights{dtype}"

    @property
    def learning_rate(self) -> float:
        """Of the step that comes next."""
        return float(self.param_groups[0]["lr"])

    def scale_loss(self, loss: Tensor) -> Tensor:
        """As it is."""
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients; the buffer behind them is Megatron's."""
        self.adam.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Clip by the norm of all gradients, update, and move the schedule on."""
        if closure is not None:
            closure()
        weights = [weight for group in self.adam.param_groups for weight in group["params"]]
        for weight in weights:
            weight.grad = weight.main_grad
        gradients = [weight.grad for weight in weights]
        norm, _ = optimizer.l2_norm(0, torch.empty(0), [gradients], False)
        self.grad_norm = float(norm)
        if 0 < self.clipping < self.grad_norm:
            torch._foreach_mul_(gradients, self.clipping / (self.grad_norm + 1e-6))
        self.adam.step()
        self.scheduler.step(increment=1)
