"""A plain GPT in PyTorch: learned positions, pre-norm, GELU, biases, tied embeddings, fused causal attention; nothing compiled.

The same structure as GPT-2 (Radford et al. 2019), which the accelerator suite trains in eight sizes.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from tprimat.facts.flops import flop_per_token, parameters
from tprimat.facts.models import ModelShape
from tprimat.probe.case import Case
from tprimat.probe.timing import Call, Effort


class Block(nn.Module):
    """Attention and feed-forward, each behind a layer norm and beside a residual connection."""

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
        """Shape (batch, tokens, hidden) in and out."""
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
    """Tokens to next-token loss."""

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
        """Both of shape (batch, tokens); a scalar in fp32."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(shape: ModelShape, device: torch.device) -> Gpt:
    """The model with bf16 weights, made on the device itself: 13 billion fp32 weights would not fit the host's memory first."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return Gpt(shape)
    finally:
        torch.set_default_dtype(before)


# Training of GPT-style transformers from 30 million to 13 billion weights on one device, and the same under DDP.
#
# Weights, gradients and both states of AdamW (fused on a GPU) are bf16: 8 bytes a weight, so that the largest size fits one
# accelerator. This is a measure of speed; training that must converge keeps fp32 master weights. No recomputation, nothing
# compiled. `flop` counts `causal` (facts/flops.py); six times all parameters, the other count in use, follows from the shape.

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
