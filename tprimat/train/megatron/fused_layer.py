"""A transformer layer whose residual sums and norms are one kernel each, forwards and backwards."""

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from tprimat.train.megatron.compilation import compiled
from tprimat.train.megatron.norms import CompiledRMSNorm, rms_norm

Sum = tuple[Tensor, Tensor]
"""Two tensors of one shape that stand for their sum, which nobody has taken yet."""


class SumRMSNorm(CompiledRMSNorm):
    """RMSNorm of what may be a sum, which the residual stream then goes on with."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Sum:  # type: ignore[override]
        """The sum of both arguments (or the one), and it normalised in its last dimension; each of the arguments' shape."""
        if residual is None:
            return x, super().forward(x)
        return compiled(_sum_and_norm)(x, residual, self.weight, self.eps)  # type: ignore[no-any-return]


class FusedLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's TransformerLayer for training without dropout and biases; both of its norms are a SumRMSNorm."""

    leaves_sum = False
    """The next layer takes the sum at this one's end, together with its first norm."""

    def forward(self, hidden_states: Tensor | Sum, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor | Sum, None]:
        """Attention and feed-forward block, each around the residual stream; shape (tokens, sequences, hidden) in and out."""
        summands = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        # Called as modules, so that hooks which wait for gathered weights fire.
        stream, normed = self.input_layernorm(*summands)
        attention, _none = self.self_attention(normed, attention_mask=attention_mask)
        stream, normed = self.pre_mlp_layernorm(attention, stream)
        feed_forward, _none = self.mlp(normed)
        return (feed_forward, stream) if self.leaves_sum else feed_forward + stream, None


def leave_sums(model: GPTModel) -> None:
    """Let each layer of a chunk but the last leave its sum to the next. Recomputation keeps tensors between layers: not there."""
    if model.config.recompute_granularity == "full":
        return
    for layer in model.decoder.layers[:-1]:
        if isinstance(layer, FusedLayer):
            layer.leaves_sum = True


def _sum_and_norm(branch: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    stream = branch + residual
    return stream, rms_norm(stream, weight, epsilon)
