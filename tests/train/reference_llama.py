"""Llama and Qwen 2 written down from their papers in plain torch, one layer after the other: what the engine is checked against.

Llama 2 (arXiv:2307.09288) for grouped-query attention, RMSNorm and SwiGLU; RoFormer (arXiv:2104.09864) for rotary positions;
the Llama 3.1 model card for the rescaled frequencies; Qwen2 (arXiv:2407.10671) for the QKV bias.
"""

import math

import torch
from torch import Tensor


def split_fused_weights(weights: dict[str, Tensor], shape) -> dict[str, Tensor]:
    """Megatron keeps q, k and v of each key/value group side by side, and gate above up; here each has a name of its own."""
    named = {}
    per_group = shape.heads // shape.kv_heads
    for name, weight in weights.items():
        if ".linear_qkv." in name:
            groups = weight.reshape(shape.kv_heads, per_group + 2, shape.head_dim, *weight.shape[1:])
            for letter, part in (("q", groups[:, :per_group]), ("k", groups[:, per_group]), ("v", groups[:, per_group + 1])):
                named[name.replace("linear_qkv", letter)] = part.reshape(-1, *weight.shape[1:])
        elif ".linear_fc1." in name:
            named[name.replace("linear_fc1", "gate")], named[name.replace("linear_fc1", "up")] = weight.chunk(2)
        else:
            named[name] = weight
    return named


def rotary_frequencies(shape) -> Tensor:
    """Angular frequency of each pair of dimensions, shape (head_dim / 2,)."""
    frequencies = []
    for pair in range(shape.head_dim // 2):
        frequency = shape.rope_base ** (-2 * pair / shape.head_dim)
        scaling = shape.rope_scaling
        if scaling:
            wavelength = 2 * math.pi / frequency
            longest = scaling.original_context_tokens / scaling.low_frequency_factor
            shortest = scaling.original_context_tokens / scaling.high_frequency_factor
            if wavelength > longest:
                frequency /= scaling.factor
            elif wavelength > shortest:
                mix = (scaling.original_context_tokens / wavelength - scaling.low_frequency_factor) / (
                    scaling.high_frequency_factor - scaling.low_frequency_factor
                )
                frequency = (1 - mix) * frequency / scaling.factor + mix * frequency
        frequencies.append(frequency)
    return torch.tensor(frequencies)


def rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    """x: (batch, heads, tokens, head_dim); dimension i is paired with i + head_dim / 2."""
    angles = torch.outer(torch.arange(x.shape[2]).float(), frequencies)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight


class ReferenceModel:
    def __init__(self, shape, weights: dict[str, Tensor]) -> None:
        self.shape, self.weights = shape, weights

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def attention(self, x: Tensor, layer: str) -> Tensor:
        shape, (batch, tokens, _) = self.shape, x.shape
        q, k, v = (
            self.linear(x, f"{layer}.self_attention.{letter}").reshape(batch, tokens, heads, shape.head_dim).transpose(1, 2)
            for letter, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
        )
        frequencies = rotary_frequencies(shape)
        q, k = rotate(q, frequencies), rotate(k, frequencies)
        k, v = (part.repeat_interleave(shape.heads // shape.kv_heads, dim=1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(shape.head_dim)
        future = torch.ones(tokens, tokens).triu(1).bool()
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.linear(mixed.transpose(1, 2).reshape(batch, tokens, -1), f"{layer}.self_attention.linear_proj")

    def feed_forward(self, x: Tensor, layer: str) -> Tensor:
        gate = self.linear(x, f"{layer}.mlp.gate")
        return self.linear(gate * gate.sigmoid() * self.linear(x, f"{layer}.mlp.up"), f"{layer}.mlp.linear_fc2")

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits, shape (batch, tokens, vocabulary)."""
        epsilon = self.shape.norm_epsilon
        x = self.weights["embedding.word_embeddings.weight"][tokens]
        for number in range(self.shape.layers):
            layer = f"decoder.layers.{number}"
            x = x + self.attention(rms_norm(x, self.weights[f"{layer}.input_layernorm.weight"], epsilon), layer)
            x = x + self.feed_forward(rms_norm(x, self.weights[f"{layer}.pre_mlp_layernorm.weight"], epsilon), layer)
        return self.linear(rms_norm(x, self.weights["decoder.final_layernorm.weight"], epsilon), "output_layer")
