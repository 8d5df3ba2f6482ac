"""A model's shape in the names of NeMo's model configuration, and what of a recipe's model a shape must agree with."""

from typing import Any

from tprimat.errors import LaunchError
from tprimat.facts.models import ModelShape
from tprimat.plan.nemo import LAYERS, OTHER_ENGINE
from tprimat.plan.schema import RunPlan

KIND = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "qk_layernorm": False,
    "num_moe_experts": None,
    "multi_latent_attention": False,
    "layernorm_zero_centered_gamma": False,
}
"""Fields that a shape must have to be set by `model_fields` alone; plan/nemo.py refuses other shapes."""
ACTIVATION = "silu"


def check_kind(config: Any, plan: RunPlan) -> None:
    """Whether a recipe's model is of the kind that shapes are made into.

    Raises:
        LaunchError: it has other layers than the plan's shape says; names the first field that differs.
    """
    found = [(name, getattr(config, name, wanted), wanted) for name, wanted in KIND.items()]
    found.append(("activation_func", getattr(config.activation_func, "__name__", None), ACTIVATION))
    for name, value, wanted in found:
        if value != wanted:
            what = f"NeMo's recipe {plan.nemo_recipe} builds another kind of model than {plan.shape.name}: {name} is {value}."
            raise LaunchError(
                what, where=f"models.{plan.model}.nemo_recipe", why=LAYERS, fix=f"another recipe, or {OTHER_ENGINE}"
            )
    if hasattr(config, "scale_factor") != (plan.shape.rope_scaling is not None):
        what = f"NeMo's recipe {plan.nemo_recipe} treats rotary frequencies otherwise than {plan.shape.name}."
        raise LaunchError(what, where=f"models.{plan.model}.nemo_recipe", fix=f"another recipe, or {OTHER_ENGINE}")


def model_fields(shape: ModelShape) -> dict[str, Any]:
    """A shape in the names of NeMo's model configuration. For a recipe's own model this changes nothing (a test says so)."""
    fields = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_epsilon,
        "add_qkv_bias": shape.qkv_bias,
        "rotary_base": shape.rope_base,
        "share_embeddings_and_output_weights": shape.tied_embeddings,
        "vocab_size": shape.vocabulary,
    }
    if shape.rope_scaling is not None:
        scaling = shape.rope_scaling
        fields |= {
            "scale_factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "old_context_len": scaling.original_context_tokens,
        }
    return fields
