"""What the first call of a rank's first layer shows: whether it is recomputed, and how its tokens are split.

A configuration says what was asked for. Recomputation runs the forward pass once without gradients, and sequence parallelism
gives each tensor rank its share of the tokens between the layers: both are seen in the running modules.
"""

from typing import Any, Literal

import torch
from megatron.core import parallel_state
from torch import Tensor


class LayerWatch:
    """Observes the first forward pass of a transformer layer, then removes itself."""

    def __init__(self, layer: Any) -> None:
        self._stream_tokens: int | None = None
        self._keeps_layer: bool | None = None
        self._keeps_attention: bool | None = None
        self._on_layer = layer.register_forward_pre_hook(self._see_layer, with_kwargs=True)
        self._on_attention = layer.self_attention.core_attention.register_forward_pre_hook(self._see_attention)

    def _see_layer(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = args[0] if args else kwargs["hidden_states"]
        first: Tensor = stream[0] if isinstance(stream, tuple) else stream
        self._stream_tokens = first.shape[0]
        self._keeps_layer = torch.is_grad_enabled()
        self._on_layer.remove()

    def _see_attention(self, *_: Any) -> None:
        self._keeps_attention = torch.is_grad_enabled()
        self._on_attention.remove()

    @property
    def recompute(self) -> Literal["none", "selective", "full"] | None:
        """What the backward pass computes again; None before the first step."""
        if self._keeps_layer is None or self._keeps_attention is None:
            return None
        if not self._keeps_layer:
            return "full"
        return "none" if self._keeps_attention else "selective"

    def sequence_parallel(self, sequence_tokens: int) -> bool | None:
        """Return whether tensor ranks split the tokens between the layers; None before the first step.

        Args:
            sequence_tokens: of a whole sequence.
        """
        if self._stream_tokens is None:
            return None
        ranks: int = parallel_state.get_tensor_model_parallel_world_size()
        own: int = sequence_tokens // parallel_state.get_context_parallel_world_size()
        return ranks > 1 and self._stream_tokens * ranks == own
