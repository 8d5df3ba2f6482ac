"""A transformer layer whose residual sum and second norm are one kernel, forwards and backwards."""

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from tprimat.train.megatron.compilation import compiled
from tprimat.train.megatron.norms import RMSNorm, rms_norm


class SumRMSNorm(RMSNorm):
    """RMSNorm of a sum, which the residual stream goes on with."""

    def forward(self, branch: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The sum, and the sum normalised in its last dimension, both of the arguments' shape."""
        return compiled(_sum_and_norm)(branch, residual, self.weight, self.eps)  # type: ignore[no-any-return]


class FusedLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's TransformerLayer for training without dropout and biases; `pre_mlp_layernorm` is a SumRMSNorm."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Attention and feed-forward block, each around the residual stream; shape (tokens, sequences, hidden) in and out."""
        attention, _none = self.self_attention(self.input_layernorm(hidden_states), attention_mask=attention_mask)
        # Called as a module, so that hooks which wait for gathered weights fire.
        stream, normed = self.pre_mlp_layernorm(attention, hidden_states)
        feed_forward, _none = self.mlp(normed)
        return feed_forward + stream, None


def _sum_and_norm(branch: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    stream = branch + residual
    return stream, rms_norm(stream, weight, epsilon)
