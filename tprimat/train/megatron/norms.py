"""Norms for Megatron's specs, on torch alone: its own local RMSNorm refuses sequence parallelism."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from tprimat.train.megatron.compilation import compiled


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked so that Megatron sums its gradient over the tensor ranks under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """torch's, as a function to compile."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


class CompiledRMSNorm(RMSNorm):
    """The same, with forward and backward each in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return compiled(rms_norm)(x, self.weight, self.eps)  # type: ignore[no-any-return]


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, marked likewise."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
