"""How evenly the tokens of a step were spread over experts and over the ranks that share them, as the running model saw it."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from tprimat.megatron.experts import ExpertsLayer
from tprimat.megatron.router import Router
from tprimat.train.callback import LOADS


class RoutingCounts:
    """Counts the choices of each expert in every forward pass of one of Megatron's own routers."""

    def __init__(self, router: TopKRouter) -> None:
        self.counts: list[Tensor] = []
        self.choices = 0
        router.register_forward_hook(self._count)

    def _count(self, router: TopKRouter, inputs: tuple[Tensor, ...], result: tuple[Tensor, Tensor]) -> None:
        """Count the routing map of a forward pass, shape (tokens, experts)."""
        del inputs
        if torch.is_grad_enabled():
            self.counts.append(result[1].sum(dim=0, dtype=torch.int32))
            self.choices = result[1].shape[0] * router.topk


def watch_routers(model: torch.nn.Module) -> None:
    """Count the choices that Megatron's own routers in a model make; our layers count by themselves."""
    for part in model.modules():
        if isinstance(part, TopKRouter) and not isinstance(part, Router):
            part.routing_counts = RoutingCounts(part)


SUMS = 4
"""Numbers that `load_sums` returns."""


def load_sums(chunks: Iterable[torch.nn.Module], device: torch.device) -> Tensor:
    """Sum up loads and dropped choices over this rank's layers and micro-batches, without waiting; forget the counts.

    The ranks that share experts must all call it.

    Returns:
        shape (4,), fp64, the same on all of them: over layers and micro-batches the sums of the tokens of the busiest expert over
        the mean, of the same of ranks, and of the share of dropped choices; and the number of layers times micro-batches.
    """
    layers: list[ExpertsLayer | RoutingCounts] = []
    for part in (part for chunk in chunks for part in chunk.modules()):
        counter = part if isinstance(part, ExpertsLayer) else getattr(part, "routing_counts", None)
        layers += [] if counter is None else [counter]
    counts = [count for layer in layers for count in layer.counts]
    for layer in layers:
        layer.counts.clear()
    if not counts:
        return torch.zeros(SUMS, dtype=torch.float64, device=device)
    own = torch.stack(counts)
    group = parallel_state.get_expert_model_parallel_group()
    ranks = group.size()
    if ranks > 1:
        dist.all_reduce(own, group=group)
    of_experts = own.double()
    of_ranks = of_experts.view(len(counts), ranks, -1).sum(dim=-1)
    busiest = [(load.amax(dim=1) / load.mean(dim=1)).sum() for load in (of_experts, of_ranks)]
    dropped = (1 - of_experts.sum(dim=1) / (layers[0].choices * ranks)).sum()  # all micro-batches have as many tokens
    return torch.stack([*busiest, dropped, torch.full_like(dropped, len(counts))])


def mean_loads(chunks: Iterable[torch.nn.Module], device: torch.device) -> dict[str, Tensor]:
    """Return the means of `load_sums` over all ranks as the callback records them. Every rank must call it, after each step.

    Returns:
        expert_load, rank_load and dropped, each of shape (), fp64.
    """
    sums = load_sums(chunks, device)
    dist.all_reduce(sums)
    *parts, times = sums.unbind()
    return dict(zip(LOADS, (part / times for part in parts), strict=True))
