"""NeMo 2's pre-training recipes, with Transformer Engine's layers.

A recipe is a kind of model whose dimensions can be set; its kind of layer cannot. NeMo 2.7.3 is the last release with recipes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, ClassVar

from tprimat.core.errors import LaunchError, UserError
from tprimat.core.implementations import NEMO, NEMO_ON_TORCH, Implementation, Options, Version
from tprimat.core.models import ModelShape
from tprimat.core.rows import DATA, document
from tprimat.engines.base import OTHER_ENGINE, RecipesEngine, Where, beyond, beyond_recipes, fused_loss, is_installed
from tprimat.plan.schema import RunPlan
from tprimat.records.evidence import captures_layers

TRANSFORMER_ENGINE = "transformer_engine"
REQUIRED_MODULES = ("torch", "lightning", "megatron.core", "nemo", "nemo_run", "fiddle", "modelopt", TRANSFORMER_ENGINE)
INSTALL = (
    "NVIDIA's container nvcr.io/nvidia/nemo; or make nemo and pip install 'transformer-engine[pytorch]' there, then "
    f".venv-nemo/bin/python benchmark.py --engine nemo; or {OTHER_ENGINE}"
)
LAYERS = "TPrimat sets a recipe's dimensions. Its layers stay as they are: RMSNorm, SwiGLU, rotary positions, no biases."
FAMILIES: Mapping[str, list[str]] = document(DATA / "framework_settings.yaml")["nemo_families"]
"""Beginning of a recipe's name -> what its model has besides such layers; the first counts."""
SEED = 1234
"""NeMo's own, of weights and data, which no recipe can change (nemo/lightning/megatron_init.py)."""


class NemoEngine(RecipesEngine):
    """NeMo's recipes in our worker."""

    name: ClassVar[str] = "nemo"
    trainer: ClassVar[str | None] = "tprimat.nemo"
    title: ClassVar[str] = "NeMo"
    install: ClassVar[str] = INSTALL
    needs: ClassVar[tuple[str, ...]] = REQUIRED_MODULES
    lacks: ClassVar[frozenset[str]] = frozenset({"text", "blocks"})

    def refusal(self, plan: RunPlan, where: Where) -> UserError | None:
        """Refuse what no recipe can express."""
        return next(chain(beyond(self, plan, where), _inexpressible(plan, where)), None)

    def options(self, plan: RunPlan) -> dict[str, Any]:
        """Return NeMo's own."""
        return asdict(plan.nemo)

    def implementation(self, shape: ModelShape, options: Options, transformer_engine: Version = None) -> Implementation | None:
        """Tell Transformer Engine's layers from the torch's of older records; Qwen's recipe leaves the fused activation off."""
        fused = not shape.name.startswith("qwen")
        in_fp32 = options.get("grad_reduce_in_fp32") is not False
        if not (is_installed(TRANSFORMER_ENGINE) if transformer_engine is None else transformer_engine):
            return replace(NEMO_ON_TORCH, fused_activation=fused, reduces_in_fp32=in_fp32)
        return replace(
            NEMO,
            loss=fused_loss(transformer_engine) if options.get("cross_entropy_fusion_impl") == "te" else NEMO_ON_TORCH.loss,
            fused_activation=fused,
            reduces_in_fp32=in_fp32,
            captures_layers=captures_layers(options),
        )


def _inexpressible(plan: RunPlan, where: Where) -> Iterator[LaunchError]:
    shape, recipe, place = plan.workload.shape, plan.nemo_recipe, where("models", plan.model, "nemo_recipe")
    if recipe is None:
        yield LaunchError(f"The model {plan.model} names no NeMo recipe.", where=place, fix=OTHER_ENGINE)
        return
    family = next((name for name in FAMILIES if recipe.startswith(name)), None)
    if family is None:
        what = f"NeMo's recipe {recipe} may have other kinds of layers than {shape.name}."
        yield LaunchError(what, where=place, why=LAYERS, fix=f"a recipe named {'..., '.join(FAMILIES)}...; or {OTHER_ENGINE}")
        return
    wanted = {name for name in ("qk_norm", "rope_scaling", "experts") if getattr(shape, name)}
    router = f"router_score: {shape.router_score}, router_normalized: {str(shape.router_normalized).lower()}"
    other_router = shape.experts is not None and (shape.router_score != "softmax" or not shape.router_normalized)
    beyond_it = {**beyond_recipes(shape), router: other_router}
    if lacking := [words for words, so in beyond_it.items() if so] + sorted(wanted - set(FAMILIES[family])):
        what = f"NeMo's recipe {recipe} cannot express {', '.join(lacking)} of {shape.name}."
        yield LaunchError(what, where=where("models", plan.model, "architecture"), why=LAYERS, fix=OTHER_ENGINE)
    if surplus := ", ".join(sorted(set(FAMILIES[family]) - wanted)):
        what = f"NeMo's recipe {recipe} has {surplus}, which {shape.name} lacks."
        yield LaunchError(what, where=place, fix=f"another recipe, or {OTHER_ENGINE}")
    if plan.optimizer.schedule == "linear":
        place = where("training", "optimizer", "schedule")
        yield LaunchError("NeMo's linear schedule has no warm-up.", where=place, fix="schedule: cosine or constant")
    if plan.seed != SEED:
        place = where("experiment", "seed")
        yield LaunchError(f"NeMo always trains with seed {SEED}.", where=place, fix=f"experiment.seed: {SEED}")


ENGINE = NemoEngine()
