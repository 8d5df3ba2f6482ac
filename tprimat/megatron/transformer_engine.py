"""Layers of NVIDIA's Transformer Engine in place of ours: what Megatron-LM itself trains with on NVIDIA GPUs.

One program with one clock then measures NVIDIA's best and ours, on the same weights and batches. Every switch that is `auto`
follows Megatron-LM, with Transformer Engine's fused cross-entropy and Adam instead of ours.
"""

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from tprimat.core.models import ModelShape
from tprimat.megatron import compat
from tprimat.plan.schema import RunPlan

AMAX_HISTORY = 1024
"""Steps whose largest value scales a tensor under delayed scaling; as in NeMo's recipes (nemo/collections/llm/recipes)."""


def block_spec(shape: ModelShape, experts: list[bool]) -> TransformerBlockSubmodules:
    """Return the spec of the layers of one pipeline stage, or chunk of one; `experts` says of each whether it has some."""
    from megatron.core.extensions.transformer_engine import TENorm

    specs = {
        kind: get_gpt_layer_with_transformer_engine_spec(
            num_experts=shape.experts if kind else None,
            moe_grouped_gemm=kind,
            qk_layernorm=shape.qk_norm or shape.kv_lora_rank is not None,
            multi_latent_attention=shape.kv_lora_rank is not None,
        )
        for kind in set(experts)
    }
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in experts], layer_norm=TENorm)


def settings(plan: RunPlan) -> dict[str, Any]:
    """Return what Megatron-LM sets in a TransformerConfig where Transformer Engine is installed."""
    fused: dict[str, Any] = {
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "apply_rope_fusion": plan.workload.shape.position == "rope" and plan.workload.shape.kv_lora_rank is None,
        "cross_entropy_fusion_impl": "te",
    }
    if plan.engine_options.cuda_graphs:
        # Megatron-Core records nothing for it, but tells Transformer Engine's loss not to ask the device.
        fused |= compat.whole_step_graphs()
    if plan.workload.matmul_dtype == "fp8":
        fused["fp8"] = "hybrid"
        if plan.engine_options.fp8_scaling == "current":
            fused["fp8_recipe"] = "tensorwise"
        else:
            fused |= {"fp8_recipe": "delayed", "fp8_amax_history_len": AMAX_HISTORY, "fp8_amax_compute_algo": "max"}
    return fused
