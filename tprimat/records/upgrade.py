"""Records of schema version 1 as records of version 2, which has the facts of a workload in one place instead of two."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tprimat.core.rows import DATA, document
from tprimat.core.workload import Fp8Scaling, Workload

FACTS = tuple(field.name for field in fields(Workload))
FP8_RECIPES: Mapping[str, Fp8Scaling] = document(DATA / "log_arguments.yaml")["fp8_recipes"]
"""Megatron-Core's fp8_recipe or fp4_recipe, torchao's recipe, or our fp8_scaling -> Workload.fp8_scaling."""


def upgraded_run(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's document in version 2: one of version 1 gets its facts moved, any other is returned as it is."""
    upgraded = dict(document)
    upgraded.pop("micro_batch_search", None)  # of runs that looked for their micro-batch
    if upgraded.get("schema_version", 1) != 1 or "workload" in upgraded:
        return upgraded
    asked = {name: upgraded.pop(name) for name in FACTS if name in upgraded}
    evidence, options = upgraded.get("evidence"), upgraded.get("engine_options") or {}
    if not isinstance(options, Mapping):
        return upgraded  # for the reader to refuse
    if isinstance(evidence, Mapping):
        evidence = dict(evidence)
        seen = {name: evidence.pop(name) for name in FACTS if name in evidence}
        upgraded["evidence"] = evidence | {"workload": seen}
        _complete(asked, seen, options, own=bool(options) and evidence.get("source") != "log")
    else:
        _complete(asked, {}, options, own=bool(options))
    if "enable_cuda_graph" in options:  # NeMo's older name
        rest = {name: value for name, value in options.items() if name != "enable_cuda_graph"}
        upgraded["engine_options"] = {"cuda_graph_impl": "local" if options["enable_cuda_graph"] else "none", **rest}
    return upgraded | {"schema_version": 2, "workload": asked}


def _complete(asked: dict[str, Any], seen: dict[str, Any], options: Mapping[str, Any], *, own: bool) -> None:
    """Add the facts that version 1 left to the engine's options, or to what its engines always did."""
    if not asked.get("recompute_modules"):  # empty, where attention alone was computed again
        asked.pop("recompute_modules", None)
    if "optimizer_states" in options:
        asked["optimizer_states"] = options["optimizer_states"]
        seen.pop("optimizer_states", None)
    elif own and not seen.get("optimizer_states"):
        asked["optimizer_states"] = "fp32"
    if isinstance(options.get("distributed_optimizer"), bool):
        asked["distributed_optimizer"] = options["distributed_optimizer"]
    shape = asked.get("shape")
    if own and isinstance(shape, Mapping) and shape.get("experts") and not asked.get("expert_capacity"):
        asked["expert_capacity"] = "unlimited"
    if asked.get("matmul_dtype") in {"fp8", "fp4"} and not seen.get("fp8_scaling"):
        recipe = "current" if options.get("layers") == "local" else options.get("fp8_recipe") or options.get("fp8_scaling")
        asked["fp8_scaling"] = FP8_RECIPES.get(str(recipe))
