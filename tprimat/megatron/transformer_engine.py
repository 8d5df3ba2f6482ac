"""Layers of NVIDIA's Transformer Engine in place of ours: what Megatron-LM itself trains with on NVIDIA GPUs.

One program with one clock then measures NVIDIA's best and ours, on the same weights and batches. Every switch that is `auto`
follows Megatron-LM, with Transformer Engine's fused cross-entropy and Adam instead of ours.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from tprimat.core.models import ModelShape
from tprimat.core.workload import Fp8Scaling
from tprimat.megatron import compat
from tprimat.plan.schema import RunPlan

PACKAGE = "transformer_engine"
RECIPES: Mapping[str, Fp8Scaling] = {
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "current",
    "Float8BlockScaling": "blockwise",
    "MXFP8BlockScaling": "mxfp8",
}
"""Transformer Engine's classes (transformer_engine/common/recipe) -> how they scale."""
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


def te_modules(chunks: list[Any], without: Sequence[Any] = ()) -> list[Any]:
    """Return the modules of Transformer Engine in the chunks of a model, without those in some of its layers."""
    left_out = {part for layer in without for part in layer.modules()}
    return [part for chunk in chunks for part in chunk.modules() if is_te(type(part)) and part not in left_out]


def is_te(kind: type) -> bool:
    """Whether a class is one of Transformer Engine's, or made from one."""
    return any(base.__module__.partition(".")[0] == PACKAGE for base in kind.__mro__)


def scaling_and_attention(modules: list[Any]) -> tuple[Fp8Scaling | None, str | None]:
    """Return how values were scaled to 8 bits, and fp8 if the recipe that the modules ran with has attention in it, too.

    Returns:
        None and None where nothing has multiplied in fp8.
    """
    ran = (part.fp8_meta.get("recipe") for part in modules if getattr(part, "fp8", False) and hasattr(part, "fp8_meta"))
    recipe = next((one for one in ran if one is not None), None)
    if recipe is None:
        return None, None
    names = (RECIPES.get(kind.__name__) for kind in type(recipe).__mro__)  # Megatron-Core has subclasses of them
    attends = getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False)
    return next(filter(None, names), None), "fp8" if attends else None


def multiplied_in_fp8(modules: list[Any]) -> bool | None:
    """Whether every linear layer of Transformer Engine has multiplied in fp8, read from the quantizers that its products made.

    Returns:
        None before the first product.
    """
    linear = [part for part in modules if isinstance(getattr(part, "weight", None), torch.Tensor) and hasattr(part, "fp8_meta")]
    if not linear or not any(hasattr(part, "fp8") for part in linear):
        return None
    return all(bool(getattr(part, "fp8", False)) and getattr(part, "fp8_initialized", False) for part in linear)
