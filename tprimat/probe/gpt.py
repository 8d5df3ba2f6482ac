"""A plain GPT in PyTorch: learned positions, pre-norm, GELU, biases, tied embeddings, fused causal attention; nothing compiled.

The same structure as GPT-2 (Radford et al. 2019), which the accelerator suite trains in eight sizes.
"""

import torch
from torch import nn
from torch.nn import functional

from tprimat.facts.models import ModelShape


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
