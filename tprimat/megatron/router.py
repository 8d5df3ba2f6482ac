"""The router: which experts each token passes, and with which weights.

Megatron-Core's TopKRouter holds the weights and the state of its load balancing. Its result is a table of all experts for each
token; here it is the few experts that were chosen. The choice is the same (tests/train/test_experts.py compares both).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    apply_random_logits,
    get_default_pg_collection,
    group_limited_topk,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from tprimat.megatron.compat import compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The rule by which experts are chosen and weighted, in the words of ModelShape."""

    experts_per_token: int
    score: str
    normalized: bool
    scale: float
    groups: int | None
    best_groups: int | None


def choose(logits: Tensor, bias: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token by logits, (tokens, experts), fp32; a bias, (experts,), counts only for the choice.

    Returns weights, fp32, and numbers of experts, both (tokens, experts_per_token).
    """
    scores = logits.softmax(dim=-1) if choice.score == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    if choice.groups:
        _, experts = group_limited_topk(ranked, choice.experts_per_token, *ranked.shape, choice.groups, choice.best_groups)
    else:
        experts = ranked.topk(choice.experts_per_token, dim=-1).indices
    weights = scores.gather(1, experts)
    if choice.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * choice.scale, experts


def within_capacity(weights: Tensor, experts: Tensor, number: int, factor: float) -> Tensor | None:
    """Say which choices their experts take, (tokens, k): of each expert those with the largest weights (arXiv:2006.16668, 2.2).

    Megatron-Core's moe_token_drop_policy probs: an expert takes `factor` times the mean of all `number` experts, rounded up. None
    where each expert has room for all tokens.
    """
    tokens, each = experts.shape
    capacity = math.ceil(tokens * each / number * factor)
    if capacity >= tokens:
        return None
    table = weights.new_full((tokens, number), -1.0).scatter_(1, experts, weights.detach())
    taken = torch.zeros_like(table, dtype=torch.bool)
    taken.scatter_(0, table.topk(capacity, dim=0, sorted=False).indices, value=True)
    return taken.gather(1, experts)


def sorted_places(experts: Tensor, number: int, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sort choices, (tokens, k), by expert, and those of one expert by token; dropped ones, not in `kept`, come last.

    Returns the place of each choice, (tokens, k), and for each of `number` experts the kept choices up to its last, int32.
    """
    tokens = experts.shape[0]
    chosen = torch.zeros(number, tokens, dtype=torch.int32, device=experts.device)
    if kept is None:
        chosen.scatter_(0, experts.t(), 1)
    else:
        chosen.scatter_(0, experts.t(), kept.t().to(torch.int32))
    up_to = chosen.view(-1).cumsum(0, dtype=torch.int32)
    at = experts * tokens + torch.arange(tokens, device=experts.device)[:, None]
    places, ends = up_to[at] - 1, up_to.view(number, tokens)[:, -1].contiguous()
    if kept is not None:
        behind = ends[-1] + (~kept).view(-1).cumsum(0, dtype=torch.int32).view_as(places) - 1
        places = torch.where(kept, places, behind)
    return places, ends


@dataclass(frozen=True, slots=True)
class RoutedChoices:
    """Where the tokens of a rank go."""

    weights: Tensor
    """Of each token's experts, shape (tokens, k), fp32; 0 where a choice is dropped."""
    places: Tensor
    """Of each choice in the order of experts, shape (tokens, k); dropped ones are behind all others."""
    ends: Tensor
    """Choices of each expert and all before it, without dropped ones, shape (experts,), int32."""
    counts: Tensor
    """Choices of each expert, without dropped ones, shape (experts,), int32."""
    drops: bool = False


def balance_loss(scores: Tensor, counts: Tensor, tokens: int, experts_per_token: int) -> Tensor:
    """Return this rank's part of the load-balancing loss (Switch Transformer, arXiv:2101.03961, section 2.2): 1 where it is even.

    `scores` are (own tokens, sequences, experts), each token's sum to 1; `counts` the choices of each expert, (sequences,
    experts), over all ranks that share the sequences; `tokens` those of one sequence over all ranks.
    """
    even = experts_per_token * tokens / scores.shape[-1]
    return (scores.sum(dim=0) * (counts / even)).sum() / (tokens * scores.shape[1])


class Logits(torch.autograd.Function):
    """hidden @ weight.T in fp32, whatever their dtype, without keeping an fp32 copy of the hidden states.

    Products of bf16 numbers are exact in fp32. The fp32 gradient is taken as the sum of two bf16 numbers, 16 of its 24 bits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        """Multiply, shape (..., hidden) -> (..., experts)."""
        ctx.save_for_backward(hidden, weight)
        if _multiplies_into_fp32(hidden):
            flat = torch.mm(hidden.flatten(0, -2), weight.t(), out_dtype=torch.float32)
            return flat.view(*hidden.shape[:-1], -1)
        return hidden.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply in fp32, too."""
        hidden, weight = ctx.saved_tensors
        flat, rows = gradient.flatten(0, -2), hidden.flatten(0, -2)
        if not _multiplies_into_fp32(hidden):
            return (flat @ weight.float()).to(hidden.dtype).view_as(hidden), (flat.t() @ rows.float()).to(weight.dtype)
        high = flat.bfloat16()
        halves = torch.cat((high, (flat - high.float()).bfloat16()), dim=1)  # whose sum is the gradient to 16 bits
        of_weight = torch.mm(halves.t(), rows, out_dtype=torch.float32).view(2, *weight.shape).sum(dim=0)
        return (halves @ torch.cat((weight, weight))).view_as(hidden), of_weight.to(weight.dtype)


def _multiplies_into_fp32(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype is torch.bfloat16 and torch.version.hip is None


class Router(TopKRouter):  # type: ignore[misc]
    """Chooses experts. Its logits are fp32."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, get_default_pg_collection())
        self.choice = Choice(
            experts_per_token=config.moe_router_topk,
            score=config.moe_router_score_function,
            normalized=config.moe_router_score_function == "sigmoid" or not config.moe_router_pre_softmax,
            scale=config.moe_router_topk_scaling_factor or 1.0,
            groups=config.moe_router_num_groups,
            best_groups=config.moe_router_group_topk,
        )
        self.expert_bias: Tensor | None

    def forward(self, hidden: Tensor, *_: Any) -> RoutedChoices:
        """Choose the experts of tokens, shape (tokens of this rank, sequences, hidden)."""
        if self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = self.expert_bias.float()  # the wrapper of a bf16 model converts every buffer
        logits = Logits.apply(hidden, self.weight)  # type: ignore[no-untyped-call]
        if self.config.moe_router_force_load_balancing:
            logits = apply_random_logits(logits)
        weights, experts = compiled(choose)(logits.flatten(0, 1), self.expert_bias, self.choice)
        kept, factor = None, self.config.moe_expert_capacity_factor
        if factor is not None:
            kept = within_capacity(weights, experts, self.num_experts, factor)
        places, ends = sorted_places(experts, self.num_experts, kept)
        if kept is not None:
            weights = weights * kept
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        if self.training and torch.is_grad_enabled():
            if self.expert_bias is not None:
                self.local_tokens_per_expert += counts
            weights = self._balanced(weights, experts, counts if kept is None else None, logits)
        return RoutedChoices(weights, places, ends, counts, drops=kept is not None)

    def _balanced(self, weights: Tensor, experts: Tensor, counts: Tensor | None, logits: Tensor) -> Tensor:
        """Attach the load-balancing loss to the weights; `counts` are of these choices, None where they are to be counted."""
        sequences, by_sequence = logits.shape[1], self.get_aux_loss_coeff("seq_aux_loss")
        coefficient = by_sequence or self.get_aux_loss_coeff("aux_loss")
        if not coefficient:
            return weights
        scores = compiled(_scores)(logits, self.choice.score)
        if by_sequence or self.expert_bias is not None or counts is None:
            if self.expert_bias is not None:  # the loss judges what the router would choose without the bias
                experts = scores.topk(self.topk, dim=-1).indices.flatten(0, 1)
            judged = _counts(experts, self.num_experts, sequences if by_sequence else 1)
        else:
            judged = counts.float()[None]
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(judged, group=self.tp_cp_group)
        if not by_sequence:  # all sequences of the micro-batch as one
            judged = (judged / sequences).expand(sequences, -1)
        tokens = logits.shape[0] * self.tp_cp_group.size()
        loss = compiled(balance_loss)(scores, judged, tokens, self.topk)
        return MoEAuxLossAutoScaler.apply(weights, coefficient * loss)  # type: ignore[no-any-return]


def _scores(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return logits.softmax(dim=-1)
    scores = logits.sigmoid()
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def _counts(experts: Tensor, number: int, sequences: int) -> Tensor:
    """Count the choices of each expert: shape (tokens x sequences, k) -> (sequences, number), fp32, without waiting."""
    flat = experts.view(-1, sequences, experts.shape[1]).transpose(0, 1).flatten(1)
    counts = torch.zeros(sequences, number, device=experts.device)
    return counts.scatter_add_(1, flat, torch.ones((), device=experts.device).expand(flat.shape))
