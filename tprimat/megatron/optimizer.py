"""The optimizers behind torch's interface, and the norm and clipping of many gradients in a few kernels.

MegatronOptimizer has fp32 master weights, PlainAdamW shards of them or none.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from tprimat.megatron import compat
from tprimat.megatron.model import ALWAYS, PARAMETER_DTYPES, own_part, ranks_sharing
from tprimat.plan.megatron_names import first_learning_rate, optimizer_fields, warmup_steps
from tprimat.plan.schema import EngineOptions, RunPlan

ROW = 32
"""Elements in a row: a whole number of rows lets the kernel load as widely as the hardware can."""


class CompiledAdamW(torch.optim.AdamW):
    """AdamW (decoupled weight decay, arXiv:1711.05101) over fp32 weights; clipping and update are one compiled pass over memory.

    torch's fused kernel stays below the memory's bandwidth, and clipping before it reads and writes every gradient once more.
    Gradients may be in bf16: each is read as it is and computed with in fp32.
    """

    gradient_factor: Tensor | None = None
    """Multiplies the gradients during the update, shape (1,), fp32, on their device; None for 1."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            closure()
        for group in self.param_groups:
            scalars: dict[float, Tensor] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                step, mean, square = self._advance(parameter)
                if step not in scalars:
                    scalars[step] = scalars_of(group, step, self.gradient_factor, parameter.device)
                update(own_part(parameter), own_part(parameter.grad), own_part(mean), own_part(square), scalars[step])

    def _advance(self, parameter: Tensor) -> tuple[float, Tensor, Tensor]:
        """Return the number of the step and both moments, stored like torch's, so that either can continue from the other's."""
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        state["step"] = state.get("step", torch.zeros(())) + 1
        return float(state["step"]), state["exp_avg"], state["exp_avg_sq"]


def scalars_of(group: dict[str, Any], step: float, gradient_factor: Tensor | None, device: torch.device) -> Tensor:
    """Return the numbers of one step, from 1, (8,), fp32, on the device; as Python arguments they would be compiled in."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    values = [
        1 - rate * group["weight_decay"],
        1 - beta1,
        beta2,
        1 - beta2,
        rate / (1 - beta1**step),
        (1 - beta2**step) ** -0.5,
        group["eps"],
    ]
    on_gpu = device.type == "cuda"
    known = torch.tensor(values, dtype=torch.float32, pin_memory=on_gpu).to(device, non_blocking=on_gpu)
    return torch.cat([torch.ones(1, device=device) if gradient_factor is None else gradient_factor, known])


def update(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, scalars: Tensor) -> None:
    """Update one parameter in place; all tensors are of one shape, contiguous, in fp32, the gradient in any dtype."""
    tensors = (parameter.detach(), gradient, mean, square)
    if parameter.numel() % ROW:
        _update(*tensors, scalars)
    else:
        compat.compiled_for_any_rows(_update)(*(tensor.view(-1, ROW) for tensor in tensors), scalars)


def _update(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, scalars: Tensor) -> None:
    factor, kept, mean_share, square_kept, square_share, rate, square_scale, epsilon = scalars.unbind()
    clipped = gradient.float() * factor
    new_mean = mean + (clipped - mean) * mean_share
    new_square = square * square_kept + clipped * clipped * square_share
    parameter.copy_(parameter * kept - rate * new_mean / (new_square.sqrt() * square_scale + epsilon))
    mean.copy_(new_mean)
    square.copy_(new_square)


def norm_over_ranks(parts: Iterable[tuple[list[Tensor], dist.ProcessGroup]]) -> Tensor:
    """Return the norm of all gradients of the model, shape (1,), fp32, on their device: Megatron's, without waiting for it.

    Each part is the gradients that this rank holds, with the ranks that hold the others.
    """
    squares = []
    for gradients, ranks in parts:
        if gradients:
            norms = compat.foreach_norm(gradients, 2, dtype=torch.float32)
            square = torch.linalg.vector_norm(torch.stack(norms)).reshape(1).square()
        else:  # a stage may have no gradient that counts; its ranks still take part in the sum
            square = torch.zeros(1, device=torch.cuda.current_device())
        dist.all_reduce(square, group=ranks)
        squares.append(square)
    return torch.stack(squares).sum(dim=0).sqrt()


def clipping_factor(norm: Tensor, largest: float) -> Tensor:
    """Return the factor that clips gradients of this norm, shape as norm: 1 up to the largest (0: any), and for a norm of NaN."""
    factor = largest / (norm + 1e-6)
    return torch.where(factor < 1.0, factor, 1.0) if largest > 0 else torch.ones_like(norm)


# Megatron's mixed-precision optimizer behind torch's interface, so that Lightning counts its steps.


class ScheduledOptimizer(torch.optim.Optimizer):
    """An optimizer of the engine, which advances its schedule with each step. Its parameters and rates are those of `inner`."""

    def __init__(self, inner: Any, plan: RunPlan) -> None:
        super().__init__([torch.zeros(1, requires_grad=True)], {"lr": plan.optimizer.learning_rate})
        self.param_groups = inner.param_groups
        settings, decay = plan.optimizer, max(plan.steps, 1)
        self.scheduler = OptimizerParamScheduler(
            inner,
            init_lr=first_learning_rate(settings),
            max_lr=settings.learning_rate,
            min_lr=settings.min_learning_rate,
            lr_warmup_steps=warmup_steps(plan),
            lr_decay_steps=decay,
            lr_decay_style=settings.schedule,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=decay,
            **ALWAYS["schedule"],
        )
        self.grad_norm: Tensor | float | None = None
        """Before clipping; still on the device where the host has not needed it."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The classes that step, such as DistributedOptimizer over AdamW."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.param_groups[0]["lr"])

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Clip, update, and advance the schedule."""
        if closure is not None:
            closure()
        self.grad_norm = self.clip_and_update()
        self.scheduler.step(increment=1)

    @abstractmethod
    def clip_and_update(self) -> Tensor | float:
        """Update the weights with clipped gradients, and return the norm before clipping."""


class MegatronOptimizer(ScheduledOptimizer):
    """AdamW with fp32 master weights (sharded over replicas where requested), gradient clipping and the schedule."""

    def __init__(self, chunks: list[MegatronModule], plan: RunPlan, options: EngineOptions) -> None:
        dtype = PARAMETER_DTYPES[plan.workload.matmul_dtype]
        self.megatron = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                **optimizer_fields(plan.optimizer),
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=options.distributed_optimizer,
                overlap_param_gather=options.distributed_optimizer,
            ),
            chunks,
            use_gloo_process_groups=False,
        )
        self.parts = getattr(self.megatron, "chained_optimizers", [self.megatron])
        super().__init__(self.megatron, plan)
        inner = [part.optimizer for part in self.parts]
        by_torch = all(type(optimizer) is torch.optim.AdamW for optimizer in inner)  # and not Transformer Engine's or Apex's
        self.compiled: list[CompiledAdamW] = inner if by_torch else []
        """Megatron's optimizers, if they clip and update in one pass."""
        for part, optimizer in zip(self.parts, self.compiled, strict=False):
            optimizer.__class__ = CompiledAdamW
            compat.hand_on_gradients(part)

    @property
    def description(self) -> str:
        """Megatron's class and that behind it."""
        inner = self.parts[0]
        return f"{type(inner).__name__} over {type(inner.optimizer).__name__}"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients."""
        self.megatron.zero_grad(set_to_none)

    def clip_and_update(self) -> Tensor | float:
        """Run Megatron's step."""
        return self._step_without_waiting() if self.compiled else self.megatron.step()[1]

    @torch.no_grad()
    def _step_without_waiting(self) -> Tensor:
        """Run Megatron's step without waiting for the norm, so that the host can launch the next step before this one is done."""
        self.megatron.prepare_grads()
        norm = norm_over_ranks((compat.gradients_for_norm(part), part.get_grad_stats_parallel_group()) for part in self.parts)
        factor = clipping_factor(norm, self.megatron.config.clip_grad)
        for optimizer in self.compiled:
            optimizer.gradient_factor = factor
        self.megatron.step_with_ready_grads()
        return norm


class PlainAdamW(ScheduledOptimizer):
    """An AdamW of torch or ours over the weights themselves, with the rates, decay and schedule that MegatronOptimizer has.

    Over this rank's fp32 part of each weight (fully_shard); or over bf16 weights of a single rank, with gradients and moments in
    bf16: small updates are lost, so this is for measuring speed, not for training.
    """

    def __init__(self, chunks: list[MegatronModule], plan: RunPlan, options: EngineOptions) -> None:
        settings, self.sharded = plan.optimizer, options.fully_shard
        self.weights = [weight for chunk in chunks for weight in chunk.parameters()]
        matrices, vectors = ([weight for weight in self.weights if (weight.dim() > 1) is matrix] for matrix in (True, False))
        kind = CompiledAdamW if self.sharded else partial(torch.optim.AdamW, fused=torch.cuda.is_available())
        self.adam = kind(
            [{"params": matrices, "wd_mult": 1.0}, {"params": vectors, "wd_mult": 0.0}],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
        )
        self.clipping = settings.gradient_clipping
        super().__init__(self.adam, plan)

    @property
    def description(self) -> str:
        """The class that steps, and how much of each weight this rank has, or the dtype of its moments after the first step."""
        if self.sharded:
            return f"{type(self.adam).__name__} over 1/{ranks_sharing(self.weights[0])} of each weight"
        states = next((state["exp_avg"] for state in self.adam.state.values()), None)
        dtype = "" if states is None else f", states {str(states.dtype).removeprefix('torch.')}"
        return f"{type(self.adam).__name__} without master weights{dtype}"

    @property
    def own_gradients(self) -> list[Tensor]:
        """This rank's part of each gradient."""
        return [own_part(weight.grad) for weight in self.weights if weight.grad is not None]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear sharded gradients, but keep their memory: all steps then have one peak. Megatron owns the buffer of others."""
        if not self.sharded:
            self.adam.zero_grad(set_to_none)
        elif gradients := self.own_gradients:
            compat.foreach_zero_(gradients)

    @torch.no_grad()
    def clip_and_update(self) -> Tensor:
        """Clip by the norm of all ranks' gradients and update, without waiting for the norm."""
        if not self.sharded:
            for weight in self.weights:
                weight.grad = weight.main_grad
        norm = norm_over_ranks([(self.own_gradients, parallel_state.get_data_parallel_group(with_context_parallel=True))])
        factor = clipping_factor(norm, self.clipping)
        if isinstance(self.adam, CompiledAdamW):
            self.adam.gradient_factor = factor
        else:
            compat.foreach_multiply_(self.own_gradients, factor.squeeze())
        self.adam.step()
        return norm
