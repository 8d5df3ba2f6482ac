"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1); every tensor rank has the narrow projections whole.

Megatron-Core's local modules split the narrow projections over tensor ranks and gather their outputs. The gradient of the keys'
rotary part, which all heads share, then misses the heads of the other ranks. Under sequence parallelism each rank can project
its own tokens instead: nothing is gathered but the rotary part, and its gradient is summed over the ranks.
"""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor
from torch.nn import Parameter

from tprimat.megatron.linear import ColumnParallelMatmul, LinearProducts, context_of


class WholeLinear(torch.nn.Module):
    """A linear layer without bias that every tensor rank has whole, for its own tokens.

    Of Megatron's module for the same layer (`split`) only what is not split is used.
    """

    def __init__(self, config: TransformerConfig, split: Any, inputs: int, outputs: int, products: LinearProducts) -> None:
        super().__init__()
        old = split.weight
        self.weight = Parameter(torch.empty(outputs, inputs, dtype=old.dtype, device=old.device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.alone = replace(context_of(split), ranks=1, sequence_parallel=False, exchange=None, products=products)

    @property
    def overwritten_weight(self) -> Parameter | None:
        """The weight, if its first gradient of a step overwrites."""
        return self.weight if self.alone.fused_wgrad else None

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        """Multiply, shape (tokens of this rank, sequences, in) -> (tokens of this rank, sequences, out)."""
        return ColumnParallelMatmul.apply(rows, self.weight, None, self.alone), None  # type: ignore[no-untyped-call]


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's MLASelfAttention with whole narrow projections; tensor parallelism needs sequence parallelism."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        narrow = {"linear_kv_down_proj": config.kv_lora_rank + config.qk_pos_emb_head_dim}
        if config.q_lora_rank is not None:
            narrow["linear_q_down_proj"] = config.q_lora_rank
        products = getattr(self.linear_proj, "products_type", LinearProducts)
        for name, outputs in narrow.items():
            setattr(self, name, WholeLinear(config, getattr(self, name), config.hidden_size, outputs, products()))

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Take what the spec names: since 0.19 Megatron's own choice of norms knows only Transformer Engine's."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}
