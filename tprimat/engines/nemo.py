"""NeMo 2's pre-training recipes on CUDA, or redirected to the CPU to check that they run.

A recipe is a kind of model whose dimensions can be set; its kind of layer cannot.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from typing import Any, ClassVar

from tprimat.core.errors import ConfigError, LaunchError, UserError
from tprimat.core.implementations import NEMO, NEMO_ON_TORCH, Implementation
from tprimat.core.models import ModelShape
from tprimat.engines.base import (
    Availability,
    Here,
    Settings,
    Where,
    WorkerEngine,
    bytecode_cache,
    is_installed,
    refuse_own_switches,
)
from tprimat.plan.schema import PlatformName, RunPlan
from tprimat.records.evidence import captures_layers

REQUIRED_MODULES = ("torch", "lightning", "megatron.core", "nemo", "nemo_run", "fiddle", "modelopt")
"""Imported at the top of the recipes."""
INSTALL = (
    "make nemo, then .venv-nemo/bin/python benchmark.py --engine nemo "
    "(or: pip install -c constraints-nemo.txt -r requirements-nemo.txt); or --engine megatron"
)
TRANSFORMER_ENGINE = "transformer_engine"
INSTALL_TRANSFORMER_ENGINE = "pip install transformer-engine[pytorch], or NVIDIA's container nvcr.io/nvidia/nemo"
IMPORT_SECONDS = 300.0
"""Time limit, for a cluster's cold disk."""
LAYERS = "TPrimat sets a recipe's dimensions. Its layers stay as they are: RMSNorm, SwiGLU, rotary positions, no biases."
RESCALING_RECIPES = ("llama31_", "llama32_")
"""Their models have Llama 3.1's rescaling of rotary frequencies (nemo/collections/llm/gpt/model/llama.py, Llama31Config)."""
NORMS_ON_HEADS = ("qwen3_",)
"""Their models normalise queries and keys (nemo/collections/llm/gpt/model/qwen3.py)."""
MIXTURES = ("mixtral_", "qwen3_30b_a3b", "qwen3_235b_a22b")
"""Their models have experts, chosen by softmax (nemo/collections/llm/gpt/model/mixtral.py, qwen3.py)."""
OTHER_ENGINE = "--engine megatron"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


class NemoEngine(WorkerEngine):
    """NeMo's recipes in our worker."""

    name: ClassVar[str] = "nemo"
    trainer: ClassVar[str | None] = "tprimat.nemo.run"
    automatic_on: ClassVar[PlatformName | None] = "nvidia"
    automatic_if_it_fits: ClassVar[bool] = True

    def available(self, here: Here) -> Availability:
        """Look for the modules that the recipes import."""
        missing = missing_modules()
        if not missing:
            return Availability(reason="NeMo is installed")
        what = f"The engine nemo needs {', '.join(missing)}, not installed for {sys.executable}."
        error = LaunchError(what, why="NeMo's recipes import it.", fix=INSTALL)
        return Availability(reason=f"NeMo needs {', '.join(missing)}, not installed here", error=error)

    def refusal(self, plan: RunPlan, where: Where) -> UserError | None:
        """Refuse what no recipe can express."""
        return refuse_own_switches(self.name, plan, where) or inexpressible(plan) or _contradicting_options(plan, where)

    def lacking(self, plan: RunPlan, where: Where) -> UserError | None:
        """Try to import Transformer Engine where the plan needs it."""
        needed = without_transformer_engine(plan)
        return needed if needed and not can_import(f"{TRANSFORMER_ENGINE}.pytorch") else None

    def refusal_of_layout(self, plan: RunPlan, where: Where, code: Implementation) -> UserError | None:
        """Refuse what Transformer Engine would have to do, where torch's layers run."""
        return without_transformer_engine(plan) if code.name == NEMO_ON_TORCH.name else None

    def options(self, plan: RunPlan) -> dict[str, Any]:
        """Return NeMo's own."""
        return asdict(plan.nemo)

    def implementation(self, settings: Settings) -> Implementation | None:
        """Tell Transformer Engine's layers from torch's; Qwen's recipe leaves the fused activation off (Qwen2Config)."""
        fused = not settings.shape.name.startswith("qwen")
        code = replace(
            NEMO_ON_TORCH, fused_activation=fused, reduces_in_fp32=settings.options.get("grad_reduce_in_fp32") is not False
        )
        known = settings.transformer_engine
        if not (is_installed(TRANSFORMER_ENGINE) if known is None else known):
            return code
        in_place = settings.options.get("cross_entropy_fusion_impl") == "te"
        return replace(
            NEMO,
            loss="in_place" if in_place else code.loss,
            fused_activation=fused,
            reduces_in_fp32=code.reduces_in_fp32,
            captures_layers=captures_layers(settings.options),
        )


def missing_modules() -> list[str]:
    """Return the modules that the recipes need and this Python lacks, without importing any."""
    return [name for name in REQUIRED_MODULES if not is_installed(name)]


@cache
def can_import(name: str) -> bool:
    """Return whether a module can be imported, which may fail even if it is installed. Tried in its own process."""
    if not is_installed(name.partition(".")[0]):
        return False
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            capture_output=True,
            timeout=IMPORT_SECONDS,
            check=False,
            env={**os.environ, **bytecode_cache()},
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def inexpressible(plan: RunPlan) -> LaunchError | None:
    """Say why no NeMo recipe can express the plan, whatever is installed; None: one can."""
    shape, recipe = plan.workload.shape, plan.nemo_recipe
    where = f"models.{plan.model}"
    if recipe is None:
        return LaunchError(f"The model {plan.model} names no NeMo recipe.", where=f"{where}.nemo_recipe", fix=OTHER_ENGINE)
    if features := list(_missing_features(shape, recipe)):
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


def _missing_features(shape: ModelShape, recipe: str) -> Iterator[str]:
    """Features of a shape that a recipe lacks, in the words of config.yaml."""
    if shape.norm != "rmsnorm":
        yield f"norm: {shape.norm}"
    if shape.position != "rope":
        yield f"position: {shape.position}"
    if not shape.gated:
        yield "gated: false"
    if shape.qk_norm and not recipe.startswith(NORMS_ON_HEADS):
        yield "qk_norm: true"
    if shape.linear_bias:
        yield "linear_bias: true"
    if shape.experts is not None:
        yield from _missing_of_experts(shape, recipe)
    if shape.kv_lora_rank is not None:
        yield f"kv_lora_rank: {shape.kv_lora_rank} (latent attention)"


def _missing_of_experts(shape: ModelShape, recipe: str) -> Iterator[str]:
    if not recipe.startswith(MIXTURES):
        yield f"experts: {shape.experts}"
    if shape.shared_experts:
        yield f"shared_experts: {shape.shared_experts}"
    if shape.dense_first_layers:
        yield f"dense_first_layers: {shape.dense_first_layers}"
    if shape.router_score != "softmax" or not shape.router_normalized:
        yield f"router_score: {shape.router_score}, router_normalized: {str(shape.router_normalized).lower()}"


def _contradicting_options(plan: RunPlan, where: Where) -> ConfigError | None:
    """Say which option of NeMo's would be ignored, or stop NeMo after its start; None: none."""
    options = plan.nemo

    def refused(name: str, why: str, fix: str) -> ConfigError:
        place = where("platform_optimizations", plan.platform, "nemo", name)
        return ConfigError(f"{name} is {str(getattr(options, name)).lower()}.", where=place, why=why, fix=fix)

    if options.tp_comm_overlap and not (plan.workload.layout.tensor > 1 and plan.workload.layout.sequence_parallel):
        why = f"NeMo ignores it without tensor and sequence parallelism; this layout has TP{plan.workload.layout.tensor}."
        return refused("tp_comm_overlap", why, "tp_comm_overlap: null, or --tp 2")
    if captures_layers(asdict(options)) and (reason := _without_graphs(plan)):
        return refused("cuda_graph_impl", *reason)
    if options.first_last_layers_bf16 and not (
        plan.workload.matmul_dtype == "fp8" and plan.engine_options.fp8_scaling == "current"
    ):
        why = "Megatron-Core leaves layers in bf16 under fp8 with current scaling only."
        return refused("first_last_layers_bf16", why, "first_last_layers_bf16: null, or --precision fp8 and fp8_scaling: current")
    if options.grad_reduce_in_fp32 is False and plan.workload.matmul_dtype == "fp32":
        why = "Gradients have the dtype of the weights, which is fp32."
        return refused("grad_reduce_in_fp32", why, "grad_reduce_in_fp32: null, or --precision bf16")
    if options.overlap_param_gather and not options.overlap_grad_reduce:
        why = "It needs overlap_grad_reduce, which is not true."
        return refused("overlap_param_gather", why, "overlap_grad_reduce: true beside it")
    if options.overlap_grad_reduce is False and options.overlap_param_gather is None:
        why = "The recipe may overlap the gathering of weights, which needs it."
        return refused("overlap_grad_reduce", why, "overlap_param_gather: false beside it")
    return None


def _without_graphs(plan: RunPlan) -> tuple[str, str] | None:
    """Say why Megatron-Core cannot capture the layers, and what would help; None: it can."""
    off = "cuda_graph_impl: null"
    if plan.workload.recompute != "none":
        why = f"Megatron-Core has no CUDA graphs with recomputation, and recompute is {plan.workload.recompute}."
        return why, f"{off}, or recompute: none"
    if plan.workload.shape.experts:
        return "The host waits for the number of tokens of each expert, which a CUDA graph cannot do.", f"{off}, or a dense model"
    if "expandable_segments:True" in plan.environment.get(ALLOCATOR, ""):
        return f"Megatron-Core refuses CUDA graphs with expandable_segments in {ALLOCATOR}.", f"{off}, or another {ALLOCATOR}"
    return None


def without_transformer_engine(plan: RunPlan) -> LaunchError | None:
    """Say why NeMo cannot run the plan without a working Transformer Engine; None: it can."""
    if plan.workload.matmul_dtype == "fp8":
        return LaunchError(
            "NeMo cannot train in fp8 here: Transformer Engine is not installed, or does not import.",
            why="Without it Megatron-Core ignores fp8 silently and multiplies in bf16.",
            fix=f"--precision bf16, or {INSTALL_TRANSFORMER_ENGINE}",
        )
    if plan.workload.layout.context > 1:
        return LaunchError(
            f"NeMo cannot split a sequence over {plan.workload.layout.context} ranks here: "
            "Transformer Engine is not installed, or does not import.",
            why="Attention over ranks (context parallelism) is Transformer Engine's.",
            fix=f"context_parallel_size: 1, or {INSTALL_TRANSFORMER_ENGINE}",
        )
    for name, asked in (
        ("cross_entropy_fusion_impl", plan.nemo.cross_entropy_fusion_impl == "te"),
        ("tp_comm_overlap", plan.nemo.tp_comm_overlap),
        ("cuda_graph_impl", captures_layers(asdict(plan.nemo))),
    ):
        if asked:
            value = str(getattr(plan.nemo, name)).lower()
            return LaunchError(
                f"{name} is {value}, and Transformer Engine is not installed here, or does not import.",
                where=f"platform_optimizations.{plan.platform}.nemo.{name}",
                why="It is a part of Transformer Engine.",
                fix=f"{name}: null, or {INSTALL_TRANSFORMER_ENGINE}",
            )
    return None


ENGINE = NemoEngine()
