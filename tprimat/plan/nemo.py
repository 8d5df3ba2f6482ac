"""What NeMo's recipes cannot do of a plan. A recipe is a kind of model whose dimensions can be set; its kind of layer cannot."""

from collections.abc import Iterator

from tprimat.errors import LaunchError
from tprimat.facts.models import ModelShape
from tprimat.plan.schema import RunPlan

LAYERS = "TPrimat sets a recipe's dimensions. Its layers stay as they are: RMSNorm, SwiGLU, rotary positions, dense, no biases."
RESCALING_RECIPES = ("llama31_", "llama32_")
"""Their models have Llama 3.1's rescaling of rotary frequencies (nemo/collections/llm/gpt/model/llama.py, Llama31Config)."""
OTHER_ENGINE = "--engine megatron"
NEEDS_TRANSFORMER_ENGINE = "pip install transformer-engine[pytorch], or NVIDIA's container nvcr.io/nvidia/nemo"


def refusal(plan: RunPlan) -> LaunchError | None:
    """Why the plan cannot be a NeMo recipe's, whatever is installed; None: it can."""
    shape, recipe = plan.shape, plan.nemo_recipe
    where = f"models.{plan.model}"
    if recipe is None:
        return LaunchError(f"The model {plan.model} names no NeMo recipe.", where=f"{where}.nemo_recipe", fix=OTHER_ENGINE)
    if features := list(_inexpressible(shape)):
        what = f"NeMo's recipe {recipe} cannot express {', '.join(features)} of {shape.name}."
        return LaunchError(what, where=f"{where}.architecture", why=LAYERS, fix=OTHER_ENGINE)
    rescales = recipe.startswith(RESCALING_RECIPES)
    if rescales and shape.rope_scaling is None:
        what = f"NeMo's recipe {recipe} rescales rotary frequencies, and {shape.name} has no rope_scaling."
        return LaunchError(what, where=f"{where}.nemo_recipe", fix=f"another recipe, or {OTHER_ENGINE}")
    if not rescales and shape.rope_scaling is not None:
        what = f"NeMo's recipe {recipe} cannot rescale rotary frequencies, and {shape.name} asks for it by rope_scaling."
        return LaunchError(what, where=f"{where}.nemo_recipe", fix=f"another recipe, or {OTHER_ENGINE}")
    if plan.seed == 0:
        why = "It refuses 0 and below (nemo.lightning.megatron_init)."
        return LaunchError("NeMo takes positive seeds only.", where="experiment.seed", why=why, fix="experiment.seed: 1")
    return None


def _inexpressible(shape: ModelShape) -> Iterator[str]:
    """What of a shape has no place in a recipe, in the words of config.yaml."""
    if shape.norm != "rmsnorm":
        yield f"norm: {shape.norm}"
    if shape.position != "rope":
        yield f"position: {shape.position}"
    if not shape.gated:
        yield "gated: false"
    if shape.qk_norm:
        yield "qk_norm: true"
    if shape.linear_bias:
        yield "linear_bias: true"
    if shape.experts is not None:
        yield f"experts: {shape.experts}"
    if shape.kv_lora_rank is not None:
        yield f"kv_lora_rank: {shape.kv_lora_rank} (latent attention)"


def without_transformer_engine(plan: RunPlan) -> LaunchError | None:
    """Why NeMo cannot carry out the plan where Transformer Engine does not work; None: it can."""
    if plan.precision == "fp8":
        return LaunchError(
            "NeMo cannot train in fp8 here: Transformer Engine is not installed, or does not import.",
            why="Without it Megatron-Core ignores fp8 silently and multiplies in bf16.",
            fix=f"--precision bf16, or {NEEDS_TRANSFORMER_ENGINE}",
        )
    if plan.layout.context > 1:
        return LaunchError(
            f"NeMo cannot split a sequence over {plan.layout.context} ranks here: "
            "Transformer Engine is not installed, or does not import.",
            why="Attention over ranks (context parallelism) is Transformer Engine's.",
            fix=f"context_parallel_size: 1, or {NEEDS_TRANSFORMER_ENGINE}",
        )
    return None
