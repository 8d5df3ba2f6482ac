"""Training of a three-layer network, 4096 -> 8192 -> 8192 -> 4096 with ReLU: 134 million weights, batch 256, 100 steps.

Weights, gradients and AdamW's states are bf16, as in probe/transformer.py; the loss is the mean square error to random targets.
A step counts 6 FLOP for each weight and sample: biases and the missing gradient of the input are left out of account.
"""

from functools import partial
from itertools import pairwise

import torch
from torch import nn

from tprimat.probe.case import Case
from tprimat.probe.timing import Call, Effort

BATCH = 256
STEPS = 100
WIDTHS = (4096, 8192, 8192, 4096)
SMALL_WIDTHS = (64, 128, 128, 64)
LEARNING_RATE = 1e-3
"""Large enough that bf16 weights do not round the update away."""
EFFORT = Effort(repetitions=STEPS, relative_interval=None, seconds=20.0, flush=False)


def network(widths: tuple[int, ...], device: torch.device) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    pairs = pairwise(widths)
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair, device=device, dtype=torch.bfloat16), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Forward, backward, update."""
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def prepare(widths: tuple[int, ...], device: torch.device) -> Call:
    """Network, optimizer and one batch on the device; one step as a call."""
    model = network(widths, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")
    inputs = torch.randn(BATCH, widths[0], device=device, dtype=torch.bfloat16)
    targets = torch.randn(BATCH, widths[-1], device=device, dtype=torch.bfloat16)
    return partial(train_step, model, optimizer, inputs, targets)


def cases(*, small: bool) -> list[Case]:
    """One case."""
    widths = SMALL_WIDTHS if small else WIDTHS
    weights = sum(inputs * outputs for inputs, outputs in pairwise(widths))
    return [
        Case(
            kind="mlp_step",
            variant="AdamW",
            shape={"batch": BATCH, "inputs": widths[0], "hidden": widths[1], "outputs": widths[-1], "weights": weights},
            dtype="bf16",
            flop=6 * weights * BATCH,
            prepare=partial(prepare, widths),
            effort=EFFORT,
        )
    ]
