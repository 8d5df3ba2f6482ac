"""torchtitan: `step: … loss: … memory: …GiB tps: …` (torchtitan/components/metrics.py); older versions write wps.

tps is tokens per second of one device over all steps since the previous line; memory is the allocator's reserved peak.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tprimat.logs.fields import GIBIBYTE, LAUNCHER_PREFIX, LineFields, count, in_bytes, number, plain, whole

NAME = "torchtitan"
SIGNS = (("step:", "loss:", "tps:"), ("step:", "loss:", "memory:", "wps:"))

FIELD = re.compile(r"(step|loss|grad_norm|memory|tps|wps|tflops):\s*(\S+)")
CAPACITY = re.compile(r"(?:CUDA|GPU|HIP|XPU) capacity: (.+) with ([\d.]+)GiB memory")
MESH = re.compile(r"device mesh with [\[(](.*?)[\])], [\[(]([\d, ]+)[\])]")
DEGREES = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp|ep)=(\d+)")
"""Of the line 'Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, …', which replaced the other in 2025."""
PRECISION = re.compile(r'"mixed_precision_param": "(bfloat16|float32)"|training\.mixed_precision_param\s+: (bfloat16|float32)\b')
"""In the configuration that --job.print_config prints, and in Primus's rows of it."""
SWAPPED = {"Swapped to FP8Linear layers": "tensorwise", "Swapped to MXLinear layers": "mxfp8"}
"""Primus-Turbo's layers in fp8, per tensor and in blocks (MXFP8): no other line says that they run. -> Recipe."""
CONVERTED = ("Linear layers to MXFP8Linear", "Linear layers to NVFP4Linear", "Swapped to Float8Linear layers")
RECIPE = re.compile(r"training active with recipe (\w+)")
EXPERTS = re.compile(
    r"Converted (?:GroupedExperts|GroupedLinear modules|MoE layers).* to use dynamic (float8 rowwise|MXFP8) quantization"
)
REDUCED = re.compile(r'"mixed_precision_reduce": "(\w+)"|training\.mixed_precision_reduce\s+: (\w+)')
STATES = re.compile(LAUNCHER_PREFIX + r' {8}"dtype": "(bfloat16|float32)"|training\.dtype\s+: (bfloat16|float32)\b')
"""The dtype of the stored weights, which are the masters, and so of the moments: a key of `training`."""
OPTIMIZER = re.compile(r"optimizer\.name\s+: (\w+)")
CHECKPOINTED = re.compile(r"Applied (full|selective) activation checkpointing")
SWITCHES = {
    "Compiling each TransformerBlock": "compile",
    "Compiling the loss function": "compile_loss",
    "Applied CPU Offloading": "cpu_offload",
    "Async Tensor Parallelism": "async_tensor_parallel",
    "fsdp_float8_all_gather=True": "fp8_param_gather",
}
"""Words -> option that they show to be on."""
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
DIMENSIONS = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel", "ep": "expert_parallel"}
FORCED = ('"moe_force_load_balance": true', "debug.moe_force_load_balance")
TRAINER = re.compile(
    r"(?:local batch size (?P<local>\d+), )?global batch size (?P<whole>\d+).*?"
    r"sequence length (?P<sequence>\d+), total steps (?P<steps>\d+)"
)
TRAINER_IN_TOKENS = re.compile(
    r"with (?P<rank>\d+) tokens per DP rank, (?P<step>\d+) tokens per train step, gradient accumulation steps \d+, "
    r"maximum context length (?P<context>\d+), total steps (?P<steps>\d+)"
)
"""Since August 2026 a batch is a number of tokens, and its sequences are as long as the longest context."""
SIZE = re.compile(r"size: ([\d,]+) total parameters")
MARKS = (
    "tps:",
    "wps:",
    " capacity: ",
    "device mesh with",
    "mesh with parallelism: ",
    "global batch size",
    "tokens per train step",
    "total parameters",
    "mixed_precision_param",
    "Mixed precision training is disabled",
    "Float8",
    "MX training",
    "Swapped to ",
    "Linear layers to ",
    "LoRA training active",
    "Training completed",
    "to use dynamic ",
    "mixed_precision_reduce",
    "training.dtype",
    '"dtype": ',
    "optimizer.name",
    "activation checkpointing",
    *SWITCHES,
    *FORCED,
)


def read_line(text: str) -> LineFields | None:
    """Return the fields of a line; None where it has none."""
    if "tps:" in text or "wps:" in text:
        return read_step(plain(text))
    if " capacity: " in text and (match := CAPACITY.search(plain(text))):
        return LineFields(accelerator=match[1])
    if "mesh with parallelism: " in text:
        return LineFields(evidence=read_degrees(plain(text)))
    if "device mesh with" in text and (match := MESH.search(plain(text))):
        return LineFields(evidence=read_mesh(match[1], match[2]))
    if "global batch size" in text and (match := TRAINER.search(plain(text))):
        evidence = {"global_batch_sequences": count(match["whole"]), "sequence_tokens": count(match["sequence"])}
        return LineFields(
            total_steps=count(match["steps"]),
            evidence=evidence | ({"micro_batch_sequences": count(match["local"])} if match["local"] else {}),
        )
    if "tokens per train step" in text and (match := TRAINER_IN_TOKENS.search(plain(text))):
        return read_batch_in_tokens(match)
    return read_fact(text)


def read_batch_in_tokens(match: re.Match[str]) -> LineFields:
    """Return the batch in sequences, where it is a whole number of them."""
    context = count(match["context"])
    evidence = {
        name: count(match[tokens]) // context
        for name, tokens in (("micro_batch_sequences", "rank"), ("global_batch_sequences", "step"))
        if context and count(match[tokens]) and count(match[tokens]) % context == 0
    }
    return LineFields(total_steps=count(match["steps"]), evidence={"sequence_tokens": context} | evidence)


def read_fact(text: str) -> LineFields | None:
    """Read the rarer lines."""
    if "total parameters" in text and (match := SIZE.search(plain(text))):
        return LineFields(evidence={"parameters": whole(match[1])})
    if "mixed_precision_param" in text and (match := PRECISION.search(plain(text))):
        return LineFields(
            evidence={"matmul_dtype": DTYPES[match[1]]} if match[1] else {"matmul_dtype": DTYPES[match[2]], "fp8": False}
        )
    if "Mixed precision training is disabled" in text:  # matmuls then run in the dtype of the parameters, training.dtype
        return LineFields(evidence={"matmul_dtype": "fp32"})
    if "LoRA training active" in text:
        return LineFields(arguments={"peft": "lora"})
    if FORCED[0] in text or (FORCED[1] in text and ": True (bool)" in text):
        return LineFields(evidence={"routing": "balanced"})
    if "Training completed" in text:
        return LineFields(finished=True)
    return read_narrow(text) or read_arithmetic(plain(text))


def read_narrow(text: str) -> LineFields | None:
    """Read which layers multiply in 8 or 4 bits, and how they scale."""
    if match := EXPERTS.search(text):
        arguments = {"fp8_experts": "True", "fp8_recipe": "mxfp8" if match[1] == "MXFP8" else "rowwise"}
        return LineFields(evidence={"fp8": True}, arguments=arguments)
    swapped = next((recipe for words, recipe in SWAPPED.items() if words in text), None)
    if swapped:
        return LineFields(evidence={"fp8": True}, arguments={"fp8_recipe": swapped})
    converted = any(words in text for words in CONVERTED)
    if not (converted or ("training active" in text and ("Float8" in text or "MX training" in text))):
        return None
    match = RECIPE.search(text)
    recipe = match[1] if match else next((name for name in ("tensorwise", "MXFP8", "NVFP4") if name in text), "").lower()
    dtype = "fp4" if "fp4" in recipe else "fp8"
    if recipe.startswith("mx"):
        recipe = f"mx{dtype}"
    on = {option: "True" for words, option in SWITCHES.items() if words in text}
    named = {f"{dtype}_recipe": recipe} if recipe else {}
    return LineFields(evidence={"matmul_dtype": dtype}, arguments={"fp8_linears": "True"} | named | on)


def read_arithmetic(text: str) -> LineFields | None:
    """Read the dtypes of reduction and optimizer, recomputation and switches."""
    if match := CHECKPOINTED.search(text):
        return LineFields(evidence={"recompute": match[1]})
    if match := REDUCED.search(text):
        return LineFields(evidence={"gradient_dtype": match[1] or match[2]})
    if match := STATES.search(text):
        return LineFields(evidence={"optimizer_states": DTYPES[match[1] or match[2]]})
    if match := OPTIMIZER.search(text):
        return LineFields(evidence={"optimizer": match[1]})
    on = {option: "True" for words, option in SWITCHES.items() if words in text}
    return LineFields(arguments=on) if on else None


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
        peak_reserved_bytes=in_bytes(number(memory), GIBIBYTE) if memory and "GiB" in memory else None,
    )


def read_mesh(names: str, sizes: str) -> Mapping[str, Any]:
    """Return the degrees for names ('dp_shard', 'tp') and sizes (4, 2). torchtitan builds no dimension of size 1."""
    degrees = map(count, re.findall(r"\d+", sizes))
    return degrees_of(zip((part.strip(" '\"") for part in names.split(",")), degrees, strict=False))


def read_degrees(text: str) -> Mapping[str, Any]:
    """Read 'pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=1, ep=1, etp=1'. Experts (ep, etp) share the ranks of the others."""
    return degrees_of((name, count(digits)) for name, digits in DEGREES.findall(text))


def degrees_of(degrees: Iterable[tuple[str, int]]) -> Mapping[str, Any]:
    """Return named sizes of mesh dimensions as fields of Evidence; dimensions without a name have size 1."""
    evidence: dict[str, Any] = dict.fromkeys(DIMENSIONS.values(), 1)
    world, replicas = 1, 1
    for name, degree in degrees:
        world *= 1 if name == "ep" else degree
        if name in DIMENSIONS:
            evidence[DIMENSIONS[name]] = degree
        elif name.startswith("dp"):
            replicas *= degree
    return evidence | {"world_size": world, "data_parallel": replicas}
