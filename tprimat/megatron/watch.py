"""What the first calls of a rank's layers show: what is recomputed, how tokens are split, and in which dtype weights compute.

Recomputation runs the forward pass once without gradients, and sequence parallelism gives each tensor rank its share of the
tokens between the layers: both are seen in the running modules, whatever was asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

PLACES: Mapping[str, str] = {
    "core_attn": "self_attention.core_attention",
    "layernorm": "pre_mlp_layernorm",
    "mla_up_proj": "self_attention.linear_kv_up_proj",
    "mlp": "mlp",
    "moe": "mlp.router",
    "shared_experts": "mlp.shared_experts",
}
"""Megatron's name of what selective recomputation computes again -> a module inside it, of a layer."""
LAYER, SOME_KEPT, MOST_AGAIN = "layer", "some layer kept", "most layers of a chunk again"
NOT_SEEN, KEPT, RECOMPUTED = -1, 0, 1


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What the backward pass computes again."""

    recompute: Literal["none", "selective", "full"]
    modules: tuple[str, ...] | None
    """Under selective, Megatron's names in alphabetical order."""
    layers: int | None = None
    """Under full, the most layers of a chunk that are computed again; None: all are."""


class LayerWatch:
    """Observes the first forward pass of a rank's layers, and the modules of the first one and of the first with experts.

    Its hooks remove themselves.
    """

    def __init__(self, chunks: Sequence[Sequence[Any]]) -> None:
        layers = [layer for chunk in chunks for layer in chunk]
        self._stream_tokens: int | None = None
        self.weight_dtype: torch.dtype | None = None
        """Of a layer's weights as it computes with them; None before the first step."""
        self._seen = dict.fromkeys((LAYER, SOME_KEPT, MOST_AGAIN, *PLACES), NOT_SEEN)
        self._again = [0] * len(chunks)
        first = layers[0]
        with_experts = [layer for layer in layers if has_router(layer)][:1]
        self._on_layer = first.register_forward_pre_hook(self._see_layer, with_kwargs=True)
        for number, chunk in enumerate(chunks):
            for layer in chunk:
                own: list[Any] = []
                own.append(layer.register_forward_pre_hook(partial(self._count_layer, number, own)))
        for layer in {id(layer): layer for layer in (first, *with_experts)}.values():
            for name in PLACES:
                self._watch(name, layer)

    def _watch(self, name: str, layer: Any) -> None:
        """Hook into a module of a layer, if the layer has it; an mlp with a router is none."""
        try:
            module = attrgetter(PLACES[name])(layer)
        except AttributeError:
            return
        if isinstance(module, torch.nn.Module) and not (name == "mlp" and has_router(layer)):
            hooks: list[Any] = []
            hooks.append(module.register_forward_pre_hook(partial(self._see_module, name, hooks)))

    def _see_layer(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = args[0] if args else kwargs["hidden_states"]
        first: Tensor = stream[0] if isinstance(stream, tuple) else stream
        self._stream_tokens = first.shape[0]
        self.weight_dtype = next((weight.dtype for weight in layer.parameters()), None)
        self._seen[LAYER] = KEPT if torch.is_grad_enabled() else RECOMPUTED
        self._on_layer.remove()

    def _count_layer(self, chunk: int, own: list[Any], *_: Any) -> None:
        if torch.is_grad_enabled():
            self._seen[SOME_KEPT] = 1
        else:
            self._again[chunk] += 1
            self._seen[MOST_AGAIN] = max(self._again)
        own.pop().remove()

    def _see_module(self, name: str, hooks: list[Any], *_: Any) -> None:
        self._seen[name] = max(self._seen[name], KEPT if torch.is_grad_enabled() else RECOMPUTED)
        hooks.pop().remove()

    def recomputed(self, device: torch.device | None = None) -> Recomputed | None:
        """Return what the backward pass computes again; None before the first step.

        Args:
            device: of a tensor for all ranks, which must then all call this, since a stage may lack a kind of layer; None asks
                this rank alone.
        """
        seen = self._seen
        if device is not None:
            everywhere = torch.tensor(list(seen.values()), device=device)
            dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
            seen = dict(zip(seen, everywhere.tolist(), strict=True))
        if seen[LAYER] == NOT_SEEN:
            return None
        if seen[LAYER] == RECOMPUTED:
            return Recomputed("full", None, seen[MOST_AGAIN] if seen[SOME_KEPT] == 1 else None)
        again = tuple(name for name in PLACES if seen[name] == RECOMPUTED)
        if "moe" in again:  # the shared experts are inside
            again = tuple(name for name in again if name != "shared_experts")
        return Recomputed("selective", again) if again else Recomputed("none", None)

    def sequence_parallel(self, sequence_tokens: int) -> bool | None:
        """Return whether tensor ranks split the tokens of a sequence between the layers; None before the first step."""
        if self._stream_tokens is None:
            return None
        ranks: int = parallel_state.get_tensor_model_parallel_world_size()
        own: int = sequence_tokens // parallel_state.get_context_parallel_world_size()
        return ranks > 1 and self._stream_tokens * ranks == own


def has_router(layer: Any) -> bool:
    """Whether a layer has experts."""
    return hasattr(getattr(layer, "mlp", None), "router")
