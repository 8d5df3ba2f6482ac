"""What the calls of a rank's layers show: what is recomputed, how tokens are split, the dtype of weights, and loads of experts.

Recomputation runs the forward pass once without gradients, and sequence parallelism gives each tensor rank its share of the
tokens between the layers: both are seen in the running modules, whatever was asked for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tprimat.train.callback import LOADS

PLACES: Mapping[str, str] = {
    "core_attn": "self_attention.core_attention",
    "layernorm": "pre_mlp_layernorm",
    "mla_up_proj": "self_attention.linear_kv_up_proj",
    "mlp": "mlp",
    "moe": "mlp.router",
    "shared_experts": "mlp.shared_experts",
}
"""Megatron's name of what selective recomputation computes again -> a module inside it, of a layer."""
LAYER = "layer"
NOT_SEEN, KEPT, RECOMPUTED = -1, 0, 1


class LayerWatch:
    """Observes the first forward pass of a rank's first layer, and of the modules of this one and of the first with experts."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._stream_tokens: int | None = None
        self.weight_dtype: torch.dtype | None = None
        """Of a layer's weights as it computes with them; None before the first step."""
        self._seen = dict.fromkeys((LAYER, *PLACES), NOT_SEEN)
        self._hooks = [before_first_call(layers[0], partial(self._see_layer, layers[0]))]
        with_experts = [layer for layer in layers if has_router(layer)][:1]
        for layer in {id(layer): layer for layer in (layers[0], *with_experts)}.values():
            for name in PLACES:
                self._watch(name, layer)

    def _watch(self, name: str, layer: Any) -> None:
        """Hook into a module of a layer, if the layer has it; an mlp with a router is none."""
        try:
            module = attrgetter(PLACES[name])(layer)
        except AttributeError:
            return
        if isinstance(module, torch.nn.Module) and not (name == "mlp" and has_router(layer)):
            self._hooks.append(before_first_call(module, lambda *_: self._see(name)))

    def _see(self, name: str) -> None:
        self._seen[name] = max(self._seen[name], KEPT if torch.is_grad_enabled() else RECOMPUTED)

    def _see_layer(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream: Tensor = args[0] if args else kwargs["hidden_states"]
        self._stream_tokens = stream.shape[0]
        self.weight_dtype = next((weight.dtype for weight in layer.parameters()), None)
        self._see(LAYER)

    def stop(self) -> None:
        """Stop looking, after the first step.

        Schedules that run parts of layers never call a layer, and a layer with hooks cannot be captured as a CUDA graph.
        """
        for hook in self._hooks:
            hook.remove()

    def recomputed(self, device: torch.device) -> dict[str, Any]:
        """Return what the backward pass computes again, as facts of the evidence; none before the first step.

        All ranks must call this, since a stage may lack a kind of layer; `device` is that of a tensor for all of them.
        """
        seen = self._seen
        if dist.is_initialized():
            everywhere = torch.tensor(list(seen.values()), device=device)
            dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
            seen = dict(zip(seen, everywhere.tolist(), strict=True))
        if seen[LAYER] == NOT_SEEN:
            return {}
        if seen[LAYER] == RECOMPUTED:  # and so are all others, or the first so many of each chunk
            return {"recompute": "full"}
        again = tuple(name for name in PLACES if seen[name] == RECOMPUTED)
        if "moe" in again:  # the shared experts are inside
            again = tuple(name for name in again if name != "shared_experts")
        return {"recompute": "selective", "recompute_modules": again} if again else {"recompute": "none"}

    def sequence_parallel(self, sequence_tokens: int) -> bool | None:
        """Return whether tensor ranks split the tokens of a sequence between the layers; None before the first step."""
        if self._stream_tokens is None:
            return None
        ranks: int = parallel_state.get_tensor_model_parallel_world_size()
        own: int = sequence_tokens // parallel_state.get_context_parallel_world_size()
        return ranks > 1 and self._stream_tokens * ranks == own


def before_first_call(module: torch.nn.Module, look: Callable[[tuple[Any, ...], dict[str, Any]], object]) -> RemovableHandle:
    """Call a function with the arguments of a module's first forward pass, before it; the handle ends the wait for it."""

    def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        look(args, kwargs)

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    return handle


def has_router(layer: Any) -> bool:
    """Whether a layer has experts."""
    return hasattr(getattr(layer, "mlp", None), "router")


# How evenly the tokens of a step were spread over experts and over the ranks that share them.


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
"""Numbers that `load_sums` returns."""


def load_sums(chunks: Iterable[torch.nn.Module], device: torch.device) -> Tensor:
    """Sum up loads and dropped choices over this rank's layers and micro-batches, without waiting; forget the counts.

    The ranks that share experts must all call it.

    Returns:
        shape (4,), fp64, the same on all of them: over layers and micro-batches the sums of the tokens of the busiest expert over
        the mean, of the same of ranks, and of the share of dropped choices; and the number of layers times micro-batches.
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
    """Return the means of `load_sums` over all ranks as the callback records them. Every rank must call it, after each step.

    Returns:
        expert_load, rank_load and dropped, each of shape (), fp64.
    """
    sums = load_sums(chunks, device)
    dist.all_reduce(sums)
    *parts, times = sums.unbind()
    return dict(zip(LOADS, (part / times for part in parts), strict=True))
