"""Training steps on one device and under DDP: GPT-style transformers of 30 million to 13 billion weights, and an MLP.

The transformer is a plain GPT in PyTorch, nothing compiled: learned positions, pre-norm, GELU, biases, tied embeddings, fused
causal attention; the structure of GPT-2 (Radford et al. 2019). Weights, gradients and both states of AdamW (fused on a GPU) are
bf16: 8 bytes per weight, so that the largest size fits one accelerator. This measures speed; training that must converge keeps
fp32 master weights. There is no recomputation. `flop` uses the `causal` convention (core/flops.py); the other common count, six
times all parameters, follows from the shape.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from tprimat.core.flops import flop_per_token, parameters
from tprimat.core.models import ModelShape
from tprimat.core.rows import DATA, document
from tprimat.probe.case import Call, Case, Effort


class Block(nn.Module):
    """Attention and feed-forward, each with a layer norm before it and a residual connection around it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)
        self.norm_2 = nn.LayerNorm(shape.hidden)
        self.up = nn.Linear(shape.hidden, shape.ffn)
        self.down = nn.Linear(shape.ffn, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, hidden) to the same shape."""
        x = x + self.out(self._attend(self.norm_1(x)))
        activated: torch.Tensor = functional.gelu(self.up(self.norm_2(x)), approximate="tanh")
        result: torch.Tensor = x + self.down(activated)
        return result

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        query, key, value = self.qkv(x).view(batch, tokens, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, tokens, hidden)


class Gpt(nn.Module):
    """Next-token loss of a GPT."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.context_tokens, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar in fp32, of tokens and targets, both (batch, tokens)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(shape: ModelShape, device: torch.device) -> Gpt:
    """Build the model with bf16 weights directly on the device: 13 billion fp32 weights may not fit into the host's memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return Gpt(shape)
    finally:
        torch.set_default_dtype(before)


Size = Mapping[str, int]
"""A row of data/probe_shapes.yaml."""
EFFORT = Effort(warmup=5, warmup_seconds=5.0, repetitions=20, seconds=10.0, flush=False)


def model_shape(name: str, size: Size, *, small: bool = False) -> ModelShape:
    """Return the shape of one size."""
    return ModelShape(
        name=name,
        layers=size["layers"],
        hidden=size["hidden"],
        heads=size["heads"],
        kv_heads=size["heads"],
        head_dim=size["hidden"] // size["heads"],
        ffn=size["ffn"],
        context_tokens=size["sequence"],
        **document(DATA / "probe_shapes.yaml")["gpt_small" if small else "gpt"],
    )


def adamw(model: nn.Module, rate: float, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW, fused on a GPU."""
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=device.type == "cuda")


def train_step(loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Run forward, backward and update."""
    optimizer.zero_grad(set_to_none=True)
    loss_of().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def prepare(shape: ModelShape, batch: int, data_parallel: bool, device: torch.device) -> Call:
    """Build the model, its optimizer and one batch of random tokens; return one step as a call."""
    model: nn.Module = build(shape, device)
    if data_parallel:
        devices = [device.index] if device.type == "cuda" else None
        model = nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    tokens = torch.randint(shape.vocabulary, (batch, shape.context_tokens + 1), device=device)
    loss = partial(model, tokens[:, :-1], tokens[:, 1:])  # each token predicts the next
    return partial(train_step, loss, adamw(model, 1e-4, device))


def cases(*, small: bool, ranks: int | None = None) -> list[Case]:
    """Return the eight sizes on one device, smallest first, or two on `ranks` under DDP. FLOP are those of all ranks."""
    every = document(DATA / "probe_shapes.yaml")[("transformer" if ranks is None else "ddp") + ("_small" if small else "")]
    return [case_of(name, size, ranks, small=small) for name, size in every.items()]


def case_of(name: str, size: Size, ranks: int | None, *, small: bool) -> Case:
    """Return one size as a case."""
    shape, batch, length = model_shape(name, size, small=small), size["batch"], size["sequence"]
    return Case(
        kind="transformer_step" if ranks is None else "ddp_step",
        variant=name,
        shape={
            **{side: size[side] for side in ("layers", "heads", "hidden", "ffn")},
            "vocabulary": shape.vocabulary,
            "parameters": parameters(shape).total,
            "batch": batch,
            "sequence": length,
            "ranks": ranks or 1,
        },
        dtype="bf16",
        flop=round(batch * length * (ranks or 1) * flop_per_token(shape, length, "causal")),
        prepare=partial(prepare, shape, batch, ranks is not None),
        effort=EFFORT if ranks is None else replace(EFFORT, warmup_seconds=None, seconds=None),  # the same on every rank
    )


MLP_BATCH = 256
MLP_WIDTHS, SMALL_MLP_WIDTHS = (4096, 8192, 8192, 4096), (64, 128, 128, 64)
MLP_LEARNING_RATE = 1e-3
"""Large enough that rounding to bf16 does not lose the update."""
MLP_EFFORT = Effort(repetitions=100, seconds=20.0, flush=False)


def prepare_mlp(widths: tuple[int, ...], device: torch.device) -> Call:
    """Build linear layers with ReLU between them, an optimizer and one batch with random targets; return one step as a call."""
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair, device=device, dtype=torch.bfloat16), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    make = partial(torch.randn, device=device, dtype=torch.bfloat16)
    inputs, targets = make(MLP_BATCH, widths[0]), make(MLP_BATCH, widths[-1])
    return partial(train_step, lambda: functional.mse_loss(model(inputs), targets), adamw(model, MLP_LEARNING_RATE, device))


def mlp_cases(*, small: bool) -> list[Case]:
    """Return the MLP, 4096 -> 8192 -> 8192 -> 4096, as one case.

    A step counts 6 FLOP per weight and sample; biases and the missing gradient of the input are ignored.
    """
    widths = SMALL_MLP_WIDTHS if small else MLP_WIDTHS
    weights = sum(inputs * outputs for inputs, outputs in pairwise(widths))
    return [
        Case(
            kind="mlp_step",
            variant="AdamW",
            shape={"batch": MLP_BATCH, "inputs": widths[0], "hidden": widths[1], "outputs": widths[-1], "weights": weights},
            dtype="bf16",
            flop=6 * weights * MLP_BATCH,
            prepare=partial(prepare_mlp, widths),
            effort=MLP_EFFORT,
        )
    ]
