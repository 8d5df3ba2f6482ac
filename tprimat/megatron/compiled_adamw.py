"""AdamW whose clipping and update are one compiled pass over the memory.

torch's fused kernel takes many tensors in small chunks, which keeps it below the memory's bandwidth, and clipping before it reads
and writes every gradient once more.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

ROW = 32
"""Elements in a row: a whole number of rows lets the kernel load as widely as the hardware can."""


class CompiledAdamW(torch.optim.AdamW):
    """AdamW (decoupled weight decay, arXiv:1711.05101) over fp32 tensors, with the options that Megatron uses."""

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
                update(parameter, parameter.grad, mean, square, scalars[step])

    def _advance(self, parameter: Tensor) -> tuple[float, Tensor, Tensor]:
        """Return the number of the step and both moments, stored like torch's, so that either can continue from the other's."""
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        state["step"] = state.get("step", torch.zeros(())) + 1
        return float(state["step"]), state["exp_avg"], state["exp_avg_sq"]


def scalars_of(group: dict[str, Any], step: float, gradient_factor: Tensor | None, device: torch.device) -> Tensor:
    """Return the numbers of one step, shape (8,), fp32, on the device; as Python arguments they would be compiled in.

    Args:
        group: of torch's AdamW.
        step: its number, from 1.
        gradient_factor: for clipping; None for 1.
        device: of the parameters.
    """
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
    """Update one parameter in place; all tensors are of one shape, contiguous, fp32."""
    tensors = (parameter.detach(), gradient, mean, square)
    if parameter.numel() % ROW:
        _update(*tensors, scalars)
    else:
        _compiled()(*(tensor.view(-1, ROW) for tensor in tensors), scalars)


@cache
def _compiled() -> Callable[..., None]:
    """Compile the update; torch makes it work for any number of rows when it meets the second one."""
    return torch.compile(_update)


def _update(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, scalars: Tensor) -> None:
    factor, kept, mean_share, square_kept, square_share, rate, square_scale, epsilon = scalars.unbind()
    clipped = gradient * factor
    new_mean = mean + (clipped - mean) * mean_share
    new_square = square * square_kept + clipped * clipped * square_share
    parameter.copy_(parameter * kept - rate * new_mean / (new_square.sqrt() * square_scale + epsilon))
    mean.copy_(new_mean)
    square.copy_(new_square)
