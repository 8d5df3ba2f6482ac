"""How evenly the tokens of a step were spread over experts and over the ranks that share them."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from tprimat.train.callback import LOADS


class RoutingCounts:
    """Counts the choices of each expert in the forward passes of a layer: by itself in one of Megatron's own routers."""

    def __init__(self, router: TopKRouter | None = None) -> None:
        self.counts: list[Tensor] = []
        """Of each forward pass in this step: this rank's rows for each of all experts."""
        self.choices = 0
        """Of experts by this rank's tokens in a forward pass, dropped ones included."""
        if router is not None:
            router.register_forward_hook(self._count_map)

    def note(self, counts: Tensor, choices: int) -> None:
        """Note a forward pass, unless it is one that the backward pass repeats."""
        if torch.is_grad_enabled():
            self.counts.append(counts)
            self.choices = choices

    def _count_map(self, router: TopKRouter, inputs: tuple[Tensor, ...], result: tuple[Tensor, Tensor]) -> None:
        """Count the routing map of a forward pass, shape (tokens, experts)."""
        del inputs
        self.note(result[1].sum(dim=0, dtype=torch.int32), result[1].shape[0] * router.topk)


def watch_routers(model: torch.nn.Module) -> None:
    """Count the choices that Megatron's own routers in a model make; the embedded engine's layers count by themselves."""
    for part in model.modules():
        if type(part) is TopKRouter:
            part.routing_counts = RoutingCounts(part)  # type: ignore[assignment]


SUMS = 4


def load_sums(chunks: Iterable[torch.nn.Module], device: torch.device) -> Tensor:
    """Sum up loads and dropped choices over this rank's layers and micro-batches, without waiting; forget the counts.

    The ranks that share experts must all call it. Returns (SUMS,), fp64, the same on all of them: the sums of the tokens of the
    busiest expert over the mean, of the same of ranks, and of the share of dropped choices; and the number of summands.
    """
    parts = (part for chunk in chunks for part in chunk.modules())
    layers = [layer for part in parts if (layer := getattr(part, "routing_counts", None)) is not None]
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
    """Return expert_load, rank_load and dropped, the means of `load_sums` over all ranks, for the callback.

    Every rank must call it, after each step.
    """
    sums = load_sums(chunks, device)
    dist.all_reduce(sums)
    *parts, times = sums.unbind()
    return dict(zip(LOADS, (part / times for part in parts), strict=True))
