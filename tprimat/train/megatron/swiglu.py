"""SwiGLU's feed-forward block with an activation whose backward pass is one kernel at the memory's speed.

What torch.compile makes of a gradient that ends in a concatenation stays well below it; the same function with the
two halves as separate outputs, which here are views of one buffer, needs no concatenation.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from tprimat.train.megatron.compilation import compiled


class SwiGLUMLP(MLP):  # type: ignore[misc]
    """Megatron's MLP for gated layers without biases."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Gate and up projection in one product, activation, down projection; shape (tokens, sequences, hidden) in and out."""
        joint, _none = self.linear_fc1(hidden_states)
        out, _none = self.linear_fc2(SwiGLU.apply(joint))  # type: ignore[no-untyped-call]
        return out, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) x up (arXiv:2002.05202)."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor) -> Tensor:
        """Shape (..., 2 x ffn), gate before up -> (..., ffn)."""
        ctx.save_for_backward(joint)
        return compiled(_swiglu)(joint)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Both halves into one buffer."""
        (joint,) = ctx.saved_tensors
        out = torch.empty_like(joint)
        # As matrices: of these torch.compile can tell that the two views do not overlap, and writes both in one kernel.
        compiled(_swiglu_backward)(gradient.flatten(0, -2), joint.flatten(0, -2), *out.view(-1, out.shape[-1]).chunk(2, dim=-1))
        return out


def _swiglu(joint: Tensor) -> Tensor:
    gate, up = joint.chunk(2, dim=-1)
    return F.silu(gate) * up


def _swiglu_backward(gradient: Tensor, joint: Tensor, gate_gradient: Tensor, up_gradient: Tensor) -> None:
    gate, up = (half.float() for half in joint.chunk(2, dim=-1))
    sigmoid = torch.sigmoid(gate)
    gate_gradient.copy_(gradient * up * sigmoid * (1 + gate * (1 - sigmoid)))
    up_gradient.copy_(gradient * gate * sigmoid)
