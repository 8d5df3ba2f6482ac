"""torchtitan: `step: … loss: … memory: …GiB tps: …` (torchtitan/components/metrics.py); older versions write wps.

tps is tokens per second of one device over all steps since the previous line; memory is the allocator's reserved peak.
"""

import re
from collections.abc import Iterable
from typing import Any

from tprimat.logs.fields import (
    GIBIBYTE,
    LAUNCHER_PREFIX,
    Dialect,
    LineFields,
    count,
    in_bytes,
    matching,
    number,
    says,
    states,
    whole,
)

FIELD = re.compile(r"(step|loss|grad_norm|memory|tps|wps|tflops):\s*(\S+)")
DEGREES = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp|ep)=(\d+)")
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
DIMENSIONS = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel", "ep": "expert_parallel"}
RECIPE = re.compile(r"training active with recipe (\w+)")
SWITCHES = {
    "Compiling each TransformerBlock": "compile",
    "Compiling the loss function": "compile_loss",
    "Applied CPU Offloading": "cpu_offload",
    "Async Tensor Parallelism": "async_tensor_parallel",
    "fsdp_float8_all_gather=True": "fp8_param_gather",
}
"""Words -> option that they show to be on."""


def read_step(text: str) -> LineFields | None:
    """Read one metrics line. Validation prints a similar line, which is not a training step."""
    fields = dict(FIELD.findall(text))
    step = whole(fields.get("step"))
    if step is None or "validate step" in text:
        return None
    memory = fields.get("memory")
    return LineFields(
        step=step,
        tokens_per_second_per_gpu=number(fields.get("tps") or fields.get("wps")),
        tflops_per_gpu=number(fields.get("tflops")),
        loss=number(fields.get("loss")),
        grad_norm=number(fields.get("grad_norm")),
        peak_reserved_bytes=in_bytes(memory, GIBIBYTE) if memory and "GiB" in memory else None,
    )


def read_trainer(match: re.Match[str]) -> LineFields:
    """Read 'local batch size 2, global batch size 16, …, sequence length 8192, total steps 20'."""
    sizes = {
        "micro_batch_sequences": match["local"],
        "global_batch_sequences": match["whole"],
        "sequence_tokens": match["sequence"],
    }
    return LineFields(
        total_steps=count(match["steps"]), evidence={name: count(digits) for name, digits in sizes.items() if digits}
    )


def read_trainer_in_tokens(match: re.Match[str]) -> LineFields:
    """Read a batch in tokens, as since August 2026: in sequences of the longest context, where it is a whole number of them."""
    context = count(match["context"])
    evidence = {
        name: count(match[tokens]) // context
        for name, tokens in (("micro_batch_sequences", "rank"), ("global_batch_sequences", "step"))
        if context and count(match[tokens]) and count(match[tokens]) % context == 0
    }
    return LineFields(total_steps=count(match["steps"]), evidence={"sequence_tokens": context} | evidence)


def read_mesh(match: re.Match[str]) -> LineFields:
    """Read names ('dp_shard', 'tp') and sizes (4, 2), as until 2025. torchtitan builds no dimension of size 1."""
    degrees = map(count, re.findall(r"\d+", match[2]))
    return degrees_of(zip((part.strip(" '\"") for part in match[1].split(",")), degrees, strict=False))


def degrees_of(degrees: Iterable[tuple[str, int]]) -> LineFields:
    """Return named sizes of mesh dimensions; others have size 1. Experts (ep, etp) share the ranks of the others."""
    evidence: dict[str, Any] = dict.fromkeys(DIMENSIONS.values(), 1)
    world, replicas = 1, 1
    for name, degree in degrees:
        world *= 1 if name == "ep" else degree
        if name in DIMENSIONS:
            evidence[DIMENSIONS[name]] = degree
        elif name.startswith("dp"):
            replicas *= degree
    return LineFields(evidence=evidence | {"world_size": world, "data_parallel": replicas})


def read_narrow(text: str) -> LineFields:
    """Read that linear layers multiply in 8 or 4 bits, and how they scale."""
    match = RECIPE.search(text)
    recipe = match[1] if match else next((name for name in ("tensorwise", "MXFP8", "NVFP4") if name in text), "").lower()
    dtype = "fp4" if "fp4" in recipe else "fp8"
    if recipe.startswith("mx"):
        recipe = f"mx{dtype}"
    named = {f"{dtype}_recipe": recipe} if recipe else {}
    gathers = {"fp8_param_gather": "True"} if "fsdp_float8_all_gather=True" in text else {}
    return LineFields(evidence={"matmul_dtype": dtype}, arguments={"fp8_linears": "True"} | named | gathers)


def read_experts(match: re.Match[str]) -> LineFields:
    """Read that experts multiply in 8 bits."""
    return LineFields(
        evidence={"fp8": True}, arguments={"fp8_experts": "True", "fp8_recipe": "mxfp8" if match[1] == "MXFP8" else "rowwise"}
    )


DIALECT = Dialect(
    name="torchtitan",
    signs=(("step:", "loss:", "tps:"), ("step:", "loss:", "memory:", "wps:")),
    rules={
        "tps:": read_step,
        "wps:": read_step,
        " capacity: ": matching(
            r"(?:CUDA|GPU|HIP|XPU) capacity: (.+) with ([\d.]+)GiB memory", lambda match: LineFields(accelerator=match[1])
        ),
        # 'pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=1, ep=1, etp=1'
        "mesh with parallelism: ": lambda text: degrees_of((name, count(digits)) for name, digits in DEGREES.findall(text)),
        "device mesh with": matching(r"device mesh with [\[(](.*?)[\])], [\[(]([\d, ]+)[\])]", read_mesh),
        "global batch size": matching(
            r"(?:local batch size (?P<local>\d+), )?global batch size (?P<whole>\d+).*?"
            r"sequence length (?P<sequence>\d+), total steps (?P<steps>\d+)",
            read_trainer,
        ),
        "tokens per train step": matching(
            r"with (?P<rank>\d+) tokens per DP rank, (?P<step>\d+) tokens per train step, gradient accumulation steps \d+, "
            r"maximum context length (?P<context>\d+), total steps (?P<steps>\d+)",
            read_trainer_in_tokens,
        ),
        "total parameters": states("parameters", r"size: ([\d,]+) total parameters", whole),
        # Of the configuration that --job.print_config prints, and of Primus's rows of it, which name no fp8.
        '"mixed_precision_param"': matching(
            r'"mixed_precision_param": "(bfloat16|float32)"',
            lambda match: LineFields(evidence={"matmul_dtype": DTYPES[match[1]]}),
        ),
        "training.mixed_precision_param": matching(
            r"training\.mixed_precision_param\s+: (bfloat16|float32)\b",
            lambda match: LineFields(evidence={"matmul_dtype": DTYPES[match[1]], "fp8": False}),
        ),
        # Products then run in the dtype of the parameters, training.dtype.
        "Mixed precision training is disabled": says(evidence={"matmul_dtype": "fp32"}),
        "LoRA training active": says(arguments={"peft": "lora"}),
        '"moe_force_load_balance": true': says(evidence={"routing": "balanced"}),
        "debug.moe_force_load_balance": states("routing", r": (True) \(bool\)", lambda _: "balanced"),
        "Training completed": says(finished=True),
        "to use dynamic ": matching(
            r"Converted (?:GroupedExperts|GroupedLinear modules|MoE layers).* to use dynamic (float8 rowwise|MXFP8) quantization",
            read_experts,
        ),
        # Primus-Turbo's layers in fp8, per tensor and in blocks: no other line says that they run.
        "Swapped to FP8Linear layers": says(evidence={"fp8": True}, arguments={"fp8_recipe": "tensorwise"}),
        "Swapped to MXLinear layers": says(evidence={"fp8": True}, arguments={"fp8_recipe": "mxfp8"}),
        "Swapped to Float8Linear layers": read_narrow,
        "Linear layers to MXFP8Linear": read_narrow,
        "Linear layers to NVFP4Linear": read_narrow,
        "training active": lambda text: read_narrow(text) if "Float8" in text or "MX training" in text else None,
        "activation checkpointing": states("recompute", r"Applied (full|selective) activation checkpointing", str),
        "mixed_precision_reduce": states(
            "gradient_dtype", r'(?:"mixed_precision_reduce": "|training\.mixed_precision_reduce\s+: )(\w+)', str
        ),
        # The dtype of the stored weights, which are the masters, and so of the moments: a key of `training`.
        **dict.fromkeys(
            ('"dtype": ', "training.dtype"),
            states(
                "optimizer_states",
                r"(?:" + LAUNCHER_PREFIX + r' {8}"dtype": "|training\.dtype\s+: )(bfloat16|float32)\b',
                DTYPES.get,
            ),
        ),
        "optimizer.name": states("optimizer", r"optimizer\.name\s+: (\w+)", str),
        **{words: says(arguments={option: "True"}) for words, option in SWITCHES.items()},
    },
)
