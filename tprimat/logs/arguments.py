"""Arguments of Megatron-LM as evidence, however a framework prints them; which ones a record keeps."""

import math
import re
from collections.abc import Mapping
from typing import Any

from tprimat.core.rows import DATA, document
from tprimat.logs.fields import NONE, LineFields, capacity, number, number_of, switch_of, truth, whole
from tprimat.records.upgrade import FP8_RECIPES

NAMES = document(DATA / "log_arguments.yaml")
WHOLE_ARGUMENTS: Mapping[str, str] = NAMES["evidence"]
"""Argument -> field of records.schema.Evidence."""
OPTIONS_OF: Mapping[str, list[str]] = NAMES["options"]
"""Framework -> its arguments that change the speed of the same work."""
OTHER_WORK: Mapping[str, str] = NAMES["other_work"]
"""Argument that asks for a step whose FLOP are not counted here -> what it says of the run."""
MAXTEXT: Mapping[str, Mapping[str, Any]] = NAMES["maxtext"]
"""Kind of setting -> MaxText's settings, and what they mean."""
OPTIONS = frozenset(name for names in OPTIONS_OF.values() for name in names)
KEPT = frozenset([*NAMES["model"], *OTHER_WORK, *NAMES["arithmetic"], *OPTIONS_OF["megatron"], *OPTIONS_OF["deepspeed"]])
VALUES: Mapping[str, Mapping[str, Mapping[str, Any]]] = NAMES["values"]
"""Argument -> its value in lower case, or other -> what it says of a run. `fp8` is a switch over `matmul_dtype` (evidence_of)."""


def argument(name: str, value: str) -> LineFields | None:
    """Return one of Megatron's arguments; None for those that records do not keep."""
    value = value.strip()
    if name == "train_iters":
        return LineFields(total_steps=whole(value))
    meant = VALUES.get(name, {})
    evidence = dict(meant.get(value.lower(), meant.get("other", {})))
    if name in {"params_dtype", "optimizer"}:
        evidence = {name.replace("params", "parameter"): value.removeprefix("torch.")}
    if name == "moe_expert_capacity_factor":
        evidence = {"expert_capacity": capacity(value)}
    if name in WHOLE_ARGUMENTS and (size := whole(value)) is not None:
        evidence = {WHOLE_ARGUMENTS[name]: size}
    if name in KEPT and not (name.endswith("vocab_size") and whole(value) is None):  # which the tokenizer tells after the dump
        return LineFields(arguments={name: value}, evidence=evidence)
    return LineFields(evidence=evidence) if evidence else None


# How a step computes: dtypes of gradients and optimizer, what is not in 8 bits, switches.

WIDE_WEIGHT_GRADIENTS = "_with_gw_hp"
"""How torchao's recipes end that multiply weight gradients in bf16."""
LONG_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def arithmetic_of(arguments: Mapping[str, str], evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of records.schema.Evidence by the arguments of a log, and by what it shows besides (`evidence`)."""
    facts: dict[str, Any] = {}
    if evidence.get("matmul_dtype") in {"fp8", "fp4"}:
        facts |= narrow(arguments, evidence["matmul_dtype"])
    if arguments.get("recompute_method") == "block" and evidence.get("recompute") == "full":
        facts |= recomputed(arguments, evidence)
    if gradients := gradient_dtype(arguments, evidence):
        facts["gradient_dtype"] = gradients
    if states := optimizer_states(arguments):
        facts["optimizer_states"] = states
    if number(arguments.get("moe_router_force_biased")):
        facts["routing"] = "biased"
    if (of_rank := capacity(arguments.get("moe_expert_rank_capacity_factor", "None"))) != "unlimited":
        facts["expert_capacity"] = of_rank
    return facts


def narrow(arguments: Mapping[str, str], dtype: str) -> dict[str, Any]:
    """Return how a run in fp8 or fp4 scales, whether attention is in 8 bits, and what keeps a wider dtype."""
    fp8_attention = ("fp8_dot_product_attention", "fp8_multi_head_attention", "enable_turbo_attention_float8")
    wide = [number_of(arguments, f"num_layers_at_{end}_in_bf16") for end in ("start", "end")]
    keeps = switch_of(arguments, "first_last_layers_bf16")
    recipe = arguments.get(f"{dtype}_recipe", "")
    scaling = FP8_RECIPES.get(recipe.removesuffix(WIDE_WEIGHT_GRADIENTS))
    parts = []
    unasked = switch_of(arguments, "fp8_wgrad") is False and dtype == "fp8" and scaling in {None, "delayed"}
    if recipe.endswith(WIDE_WEIGHT_GRADIENTS) or unasked:  # Megatron heeds its switch under delayed scaling only
        parts.append("weight gradients")
    linears, experts = (switch_of(arguments, f"fp8_{layers}") for layers in ("linears", "experts"))
    if linears != experts:
        parts.append("experts" if linears else "all but the experts")
    if (file := arguments.get("te_precision_config_file", "None")) not in NONE:
        parts.append(f"what {file} names")
    return {
        "fp8_scaling": scaling,
        "attention_dtype": "fp8" if any(switch_of(arguments, name) for name in fp8_attention) else None,
        "layers_in_bf16": sum(1 if number is None else number for number in wide) if keeps else 0 if keeps is False else None,
        "wider_parts": tuple(parts) or None,
    }


def recomputed(arguments: Mapping[str, str], evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Megatron's block method computes again: the first layers of each stage or chunk, if not all, or none."""
    layers = number_of(arguments, "recompute_num_layers")
    chunks = (evidence.get("pipeline_parallel") or 1) * (evidence.get("virtual_pipeline") or 1)
    if not layers:
        return {} if layers is None else {"recompute": "none"}
    return {} if layers * chunks >= (number_of(arguments, "num_layers") or math.inf) else {"recompute_layers": layers}


def gradient_dtype(arguments: Mapping[str, str], evidence: Mapping[str, Any]) -> str | None:
    """Return the dtype in which gradients are summed and reduced; None where the log does not say.

    Under bf16 Megatron sums in fp32 unless grad_reduce_in_bf16 or main_grads_dtype say otherwise, and turns
    accumulate_allreduce_grads_in_fp32 on after some programs have printed it (megatron/training/arguments.py).
    """
    in_fp32 = switch_of(arguments, "accumulate_allreduce_grads_in_fp32")
    bridge, in_bf16 = switch_of(arguments, "grad_reduce_in_fp32"), switch_of(arguments, "grad_reduce_in_bf16")
    if in_fp32 is None and bridge is None and in_bf16 is None:
        return None
    if in_fp32 or bridge:
        return "float32"
    weights = evidence.get("parameter_dtype") or LONG_DTYPES.get(str(evidence.get("matmul_dtype")), "bfloat16")
    narrow_sums = in_bf16 or bridge is False or short(arguments.get("main_grads_dtype", "fp32")) == "bf16"
    return "float32" if weights == "bfloat16" and not narrow_sums else weights


def optimizer_states(arguments: Mapping[str, str]) -> str | None:
    """Return the dtypes of master weights and moments, as 'fp32' or 'fp32 with moments in bf16'; None where not printed."""
    narrows = switch_of(arguments, "use_precision_aware_optimizer")
    if not narrows:
        return None if narrows is None else "fp32"
    masters = short(arguments.get("main_params_dtype", "fp32"))
    moments = list(dict.fromkeys(short(arguments.get(name, masters)) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")))
    return masters if moments == [masters] else f"{masters} with moments in {' and '.join(moments)}"


def short(dtype: str) -> str:
    """Return 'bf16' for 'torch.bfloat16'."""
    dtype = dtype.removeprefix("torch.")  # Transformer Engine keeps moments in fp8 as uint8
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}.get(dtype, dtype)


def options_of(arguments: Mapping[str, str]) -> dict[str, object]:
    """Return the switches that a log prints, without those that are not set; a list as 'core_attn+mlp'."""
    printed = {name: arguments[name] for name in sorted(OPTIONS & arguments.keys()) if arguments[name] not in NONE}
    return {
        name: "+".join(re.findall(r"[\w.-]+", text)) if (switch := truth(text)) is None else switch
        for name, text in printed.items()
    }
