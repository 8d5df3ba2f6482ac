"""Mixtures of experts and latent attention written down from their papers in plain torch, one token after the other.

Mixtral (arXiv:2401.04088) and Qwen3 (arXiv:2505.09388) for experts and norms on queries and keys; DeepSeek-V2 (arXiv:2405.04434)
for latent attention and shared experts; DeepSeek-V3 (arXiv:2412.19437) for sigmoid scores, groups and the bias of the choice.
"""

import math

import torch
from reference_llama import ReferenceModel, rms_norm, rotary_frequencies, rotate, split_fused_weights
from torch import Tensor


class ReferenceMixture(ReferenceModel):
    def __init__(self, shape, weights: dict[str, Tensor]) -> None:
        dense = {name: weight for name, weight in weights.items() if ".experts." not in name}
        super().__init__(shape, split_fused_weights(dense, shape))
        self.weights |= {name: weight for name, weight in weights.items() if ".experts." in name}

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
            return super().feed_forward(x, layer)
        flat = x.transpose(0, 1).flatten(0, 1)  # Megatron's tokens come position after position
        out = torch.stack([self.mixture(token, layer, self.chosen(token, layer)) for token in flat])
        out = out.view_as(x.transpose(0, 1)).transpose(0, 1)
        if self.shape.shared_experts:
            gate, up = (self.linear(x, f"{layer}.mlp.shared_experts.{part}") for part in ("gate", "up"))
            out = out + self.linear(gate * gate.sigmoid() * up, f"{layer}.mlp.shared_experts.linear_fc2")
        return out

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


def rotate_pairs(x: Tensor, base: float) -> Tensor:
    """x: (batch, heads, tokens, dim); dimension 2 i is paired with 2 i + 1, as complex numbers."""
    dim = x.shape[-1]
    angles = torch.outer(torch.arange(x.shape[2]).float(), base ** (-torch.arange(0, dim, 2) / dim))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)
