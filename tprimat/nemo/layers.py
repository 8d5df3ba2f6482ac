"""What NeMo's models need where Transformer Engine is not installed: Megatron-Core's local layers, and a forward step."""

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from tprimat.facts.models import ModelShape
from tprimat.megatron.layers import block_spec


@dataclass(frozen=True, slots=True)
class TorchBlockSpec:
    """The embedded engine's layers (torch's norm and attention) for a NeMo model."""

    shape: ModelShape

    def __call__(self, config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        """The layers of one pipeline stage; NeMo passes these names."""
        return block_spec(config, self.shape, vp_stage, rotary=None)


def forward_step(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """NeMo's step, which asserts Transformer Engine where data brings no mask; ours attends causally without one."""
    return model(  # type: ignore[no-any-return]
        input_ids=batch["tokens"], position_ids=batch["position_ids"], labels=batch["labels"], attention_mask=None
    )


def torch_settings(shape: ModelShape) -> dict[str, Any]:
    """Fields of NeMo's model configuration that name kernels of Transformer Engine or Apex, as they must be without."""
    return {
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "transformer_layer_spec": TorchBlockSpec(shape),
        "forward_step_fn": forward_step,
    }
