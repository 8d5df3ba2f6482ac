"""Training of GPT-style transformers from 30 million to 13 billion weights on one device, and the same under DDP.

Weights, gradients and both states of AdamW (fused on a GPU) are bf16: 8 bytes a weight, so that the largest size fits one
accelerator. This is a measure of speed; training that must converge keeps fp32 master weights. No recomputation, nothing
compiled. `flop` counts `causal` (facts/flops.py); six times all parameters, the other count in use, follows from the shape.
"""

from functools import partial

import torch
from torch import nn

from tprimat.facts.flops import flop_per_token
from tprimat.facts.models import ModelShape, parameters
from tprimat.probe.case import Case
from tprimat.probe.gpt import build
from tprimat.probe.timing import Call, Effort

VOCABULARY = 50257
"""GPT-2's; with it, tied embeddings and a position for each token of the sequence, the published sizes come out."""
SIZES: dict[str, tuple[int, int, int, int, int, int]] = {
    "Small": (6, 6, 384, 1536, 32, 512),
    "Medium": (12, 12, 768, 3072, 16, 512),
    "Large": (24, 16, 1024, 4096, 8, 512),
    "XL": (36, 20, 1280, 5120, 4, 512),
    "1.5B": (48, 24, 1536, 6144, 4, 512),
    "3B": (32, 32, 2560, 10240, 2, 512),
    "7B": (32, 32, 4096, 11008, 8, 1024),
    "13B": (40, 40, 5120, 13824, 4, 1024),
}
"""Layers, heads, width, feed-forward width, sequences in a batch, tokens in a sequence."""
SMALL_SIZES = {"Small": (2, 2, 64, 128, 2, 32), "Medium": (2, 4, 64, 256, 2, 32)}
DDP_SIZES = {"7B": SIZES["7B"], "13B": (*SIZES["13B"][:4], 8, 1024)}
SMALL_DDP_SIZES = {"Small": SMALL_SIZES["Small"]}
EFFORT = Effort(warmup=5, warmup_seconds=5.0, repetitions=20, relative_interval=None, seconds=10.0, flush=False)


def model_shape(name: str, size: tuple[int, int, int, int, int, int], *, small: bool = False) -> ModelShape:
    """One of the sizes."""
    layers, heads, width, ffn, _, tokens = size
    return ModelShape(
        name=name,
        layers=layers,
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn=ffn,
        vocabulary=256 if small else VOCABULARY,
        context_tokens=tokens,
        gated=False,
        norm="layernorm",
        linear_bias=True,
        tied_embeddings=True,
        position="learned",
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    """Forward, backward, update. Tokens: shape (batch, sequence + 1); each predicts the next."""
    optimizer.zero_grad(set_to_none=True)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    optimizer.step()


def prepare(shape: ModelShape, batch: int, data_parallel: bool, device: torch.device) -> Call:
    """Model, optimizer and one batch of random tokens on the device; one step as a call."""
    model: nn.Module = build(shape, device)
    if data_parallel:
        devices = [device.index] if device.type == "cuda" else None
        model = nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = torch.randint(shape.vocabulary, (batch, shape.context_tokens + 1), device=device)
    return partial(train_step, model, optimizer, tokens)


def case_of(name: str, size: tuple[int, int, int, int, int, int], *, ranks: int | None, small: bool) -> Case:
    """One size; ranks: over how many devices DDP spreads it, None without DDP. FLOP and tokens are those of all ranks."""
    shape = model_shape(name, size, small=small)
    batch, tokens = size[4], size[4] * size[5] * (ranks or 1)
    return Case(
        kind="transformer_step" if ranks is None else "ddp_step",
        variant=name,
        shape={
            "layers": shape.layers,
            "heads": shape.heads,
            "hidden": shape.hidden,
            "ffn": shape.ffn,
            "vocabulary": shape.vocabulary,
            "parameters": parameters(shape).total,
            "batch": batch,
            "sequence": size[5],
            "ranks": ranks or 1,
        },
        dtype="bf16",
        flop=round(tokens * flop_per_token(shape, size[5], "causal")),
        prepare=partial(prepare, shape, batch, ranks is not None),
        effort=EFFORT,
    )


def cases(*, small: bool) -> list[Case]:
    """The eight sizes on one device, smallest first."""
    sizes = SMALL_SIZES if small else SIZES
    return [case_of(name, size, ranks=None, small=small) for name, size in sizes.items()]


def ddp_cases(ranks: int, *, small: bool) -> list[Case]:
    """The two sizes that the suite scales, on so many ranks."""
    sizes = SMALL_DDP_SIZES if small else DDP_SIZES
    return [case_of(name, size, ranks=ranks, small=small) for name, size in sizes.items()]
