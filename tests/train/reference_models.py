"""Models written down from their papers in plain torch, token by token: what the engine is checked against.

Llama 2 (arXiv:2307.09288) for grouped-query attention, RMSNorm and SwiGLU; RoFormer (arXiv:2104.09864) for rotary positions;
the Llama 3.1 model card for the rescaled frequencies; Qwen2 (arXiv:2407.10671) for the QKV bias. Mixtral (arXiv:2401.04088) and
Qwen3 (arXiv:2505.09388) for experts and norms on queries and keys; DeepSeek-V2 (arXiv:2405.04434) for latent attention and
shared experts; DeepSeek-V3 (arXiv:2412.19437) for sigmoid scores, groups and the bias of the choice.
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


def rotate_pairs(x: Tensor, base: float) -> Tensor:
    """x: (batch, heads, tokens, dim); dimension 2 i is paired with 2 i + 1, as complex numbers."""
    dim = x.shape[-1]
    angles = torch.outer(torch.arange(x.shape[2]).float(), base ** (-torch.arange(0, dim, 2) / dim))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


class ReferenceModel:
    def __init__(self, shape, weights: dict[str, Tensor]) -> None:
        dense = {name: weight for name, weight in weights.items() if ".experts." not in name}
        self.shape, self.weights = shape, weights | split_fused_weights(dense, shape)

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def attention(self, x: Tensor, layer: str) -> Tensor:
        if self.shape.kv_lora_rank is not None:
            return self.latent_attention(x, f"{layer}.self_attention")
        shape, (batch, tokens, _), place = self.shape, x.shape, f"{layer}.self_attention"
        heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        q, k, v = (self.linear(x, f"{place}.{part}").reshape(batch, tokens, heads[part], -1) for part in heads)
        if shape.qk_norm:
            q = rms_norm(q, self.weights[f"{place}.q_layernorm.weight"], shape.norm_epsilon)
            k = rms_norm(k, self.weights[f"{place}.k_layernorm.weight"], shape.norm_epsilon)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        frequencies = rotary_frequencies(shape)
        k, v = (part.repeat_interleave(shape.heads // shape.kv_heads, dim=1) for part in (rotate(k, frequencies), v))
        return self.attend(rotate(q, frequencies), k, v, place)

    def latent_attention(self, x: Tensor, place: str) -> Tensor:
        shape, (batch, tokens, _) = self.shape, x.shape
        nope, rope = shape.nope_head_dim, shape.rope_head_dim
        if shape.q_lora_rank is None:
            q = self.linear(x, f"{place}.linear_q_proj")
        else:
            low = self.linear(x, f"{place}.linear_q_down_proj")
            low = rms_norm(low, self.weights[f"{place}.q_layernorm.weight"], shape.norm_epsilon)
            q = self.linear(low, f"{place}.linear_q_up_proj")
        q = q.reshape(batch, tokens, shape.heads, nope + rope).transpose(1, 2)
        low, shared_key = self.linear(x, f"{place}.linear_kv_down_proj").split([shape.kv_lora_rank, rope], dim=-1)
        low = rms_norm(low, self.weights[f"{place}.kv_layernorm.weight"], shape.norm_epsilon)
        joint = self.linear(low, f"{place}.linear_kv_up_proj").reshape(batch, tokens, shape.heads, -1).transpose(1, 2)
        k, v = joint.split([nope, shape.value_head_dim], dim=-1)
        shared_key = rotate_pairs(shared_key[:, None], shape.rope_base).expand(-1, shape.heads, -1, -1)
        q = torch.cat([q[..., :nope], rotate_pairs(q[..., nope:], shape.rope_base)], dim=-1)
        return self.attend(q, torch.cat([k, shared_key], dim=-1), v, place)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, place: str) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        future = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.linear(mixed.transpose(1, 2).flatten(2), f"{place}.linear_proj")

    def feed_forward(self, x: Tensor, layer: str) -> Tensor:
        if f"{layer}.mlp.router.weight" not in self.weights:
            return self.gated(x, f"{layer}.mlp")
        flat = x.transpose(0, 1).flatten(0, 1)  # Megatron's tokens come position after position
        out = torch.stack([self.mixture(token, layer, self.chosen(token, layer)) for token in flat])
        out = out.view_as(x.transpose(0, 1)).transpose(0, 1)
        if self.shape.shared_experts:
            out = out + self.gated(x, f"{layer}.mlp.shared_experts")
        return out

    def gated(self, x: Tensor, place: str) -> Tensor:
        gate, up = (self.linear(x, f"{place}.{part}") for part in ("gate", "up"))
        return self.linear(gate * gate.sigmoid() * up, f"{place}.linear_fc2")

    def mixture(self, token: Tensor, layer: str, experts: list[tuple[int, Tensor]]) -> Tensor:
        """One token's experts, one after the other."""
        up_weights, down_weights = (self.weights[f"{layer}.mlp.experts.{part}.weight"] for part in ("linear_fc1", "linear_fc2"))
        total = torch.zeros_like(token)
        for expert, weight in experts:
            gate, up = (up_weights[expert] @ token).chunk(2)
            total = total + weight * (down_weights[expert] @ (gate * gate.sigmoid() * up))
        return total

    def chosen(self, token: Tensor, layer: str) -> list[tuple[int, Tensor]]:
        """Experts of a token with their weights."""
        shape = self.shape
        logits = self.weights[f"{layer}.mlp.router.weight"] @ token
        scores = logits.softmax(0) if shape.router_score == "softmax" else logits.sigmoid()
        ranked = scores + self.weights.get(f"{layer}.mlp.router.expert_bias", 0)
        if shape.router_groups:
            groups = ranked.view(shape.router_groups, -1)
            each = shape.experts_per_token // shape.router_best_groups
            best = groups.sort(descending=True).values[:, :each].sum(1).argsort(descending=True)[: shape.router_best_groups]
            allowed = torch.zeros_like(groups).index_fill_(0, best, 1).bool().flatten()
            ranked = ranked.masked_fill(~allowed, -math.inf)
        experts = ranked.argsort(descending=True)[: shape.experts_per_token].tolist()
        whole = scores[experts].sum() if shape.router_normalized else 1
        return [(expert, scores[expert] / whole * shape.router_scale) for expert in experts]

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits, shape (batch, tokens, vocabulary)."""
        epsilon = self.shape.norm_epsilon
        x = self.weights["embedding.word_embeddings.weight"][tokens]
        for number in range(self.shape.layers):
            layer = f"decoder.layers.{number}"
            x = x + self.attention(rms_norm(x, self.weights[f"{layer}.input_layernorm.weight"], epsilon), layer)
            x = x + self.feed_forward(rms_norm(x, self.weights[f"{layer}.pre_mlp_layernorm.weight"], epsilon), layer)
        return self.linear(rms_norm(x, self.weights["decoder.final_layernorm.weight"], epsilon), "output_layer")
