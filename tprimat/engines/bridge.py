"""Megatron-Bridge's pre-training recipes, the successor of NeMo 2, on CUDA; shrunk ones train on a CPU in tests only."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tprimat.core.errors import LaunchError, UserError
from tprimat.core.implementations import BRIDGE, Implementation, Options, Version
from tprimat.core.models import ModelShape
from tprimat.core.rows import DATA, document
from tprimat.engines.base import ANY_LIGHTNING, OTHER_ENGINE, RecipesEngine, Where, beyond, beyond_recipes, fused_loss, release
from tprimat.plan.schema import RunPlan
from tprimat.records.environment import package_version

INSTALL = (
    f"pip install -r requirements.txt in nvcr.io/nvidia/nemo:26.04 or newer (elsewhere also megatron-bridge); or {OTHER_ENGINE}"
)
PLAIN: Mapping[str, Any] = document(DATA / "framework_settings.yaml")["bridge"]
"""Bridge's plain recipes by the kind of model, its precisions, and what no plan decides. All else stays as the recipe has it."""


class BridgeEngine(RecipesEngine):
    """Bridge's recipes in our worker."""

    name: ClassVar[str] = "bridge"
    trainer: ClassVar[str | None] = "tprimat.bridge"
    title: ClassVar[str] = "Megatron-Bridge"
    needs: ClassVar[tuple[str, ...]] = (ANY_LIGHTNING, "megatron.core", "megatron.bridge", "transformers", "transformer_engine")
    install: ClassVar[str] = INSTALL

    def refusal(self, plan: RunPlan, where: Where) -> UserError | None:
        """Refuse what no recipe can express."""
        return next(beyond(self, plan, where), None) or inexpressible(plan)

    def implementation(self, shape: ModelShape, options: Options, transformer_engine: Version = None) -> Implementation | None:
        """Tuned recipes reduce gradients in bf16, and Qwen 2.5's plain one has Megatron-Core's loss."""
        tuned = str(options.get("recipe")).startswith("perf_")
        plain_loss = "native" if model_kind(shape) == "qwen2" and not tuned else "te"
        fused = options.get("cross_entropy_fusion_impl", plain_loss) == "te"
        return replace(
            BRIDGE,
            loss=fused_loss(transformer_engine) if fused else "native",
            reduces_in_fp32=options.get("grad_reduce_in_fp32", not tuned),
        )

    def options(self, plan: RunPlan) -> dict[str, Any]:
        """Return the recipe that the plan names, or that its model has."""
        return {"recipe": recipe_name(plan)}


def model_kind(shape: ModelShape) -> str:
    """Return which plain recipe has the layers of a shape."""
    if shape.experts is not None:
        return "qwen3_moe"
    return "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"


def recipe_name(plan: RunPlan) -> str:
    """Return MODULE:FUNCTION below megatron.bridge."""
    older = release(package_version("megatron-bridge") or "0.6") < (0, 6)
    return plan.bridge.recipe or str(PLAIN["recipes_before_0.6" if older else "recipes"][model_kind(plan.workload.shape)])


def inexpressible(plan: RunPlan) -> LaunchError | None:
    """Say why Bridge's recipes cannot express the plan; None: they can."""
    shape = plan.workload.shape
    lacking = beyond_recipes(shape) | {"qkv_bias with qk_norm": shape.qkv_bias and shape.qk_norm}
    if features := [words for words, so in lacking.items() if so]:
        what = f"The engine bridge cannot set {', '.join(features)} of {shape.name} in Bridge's recipes."
        return LaunchError(what, where=f"models.{plan.model}.architecture", fix=OTHER_ENGINE)
    return None


ENGINE = BridgeEngine()
