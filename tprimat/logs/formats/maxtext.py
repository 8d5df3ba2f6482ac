"""MaxText (JAX): 'completed step: 9, seconds: 5.667, …, loss: …'. Steps count from 0.

The first times cover dispatch only, and the next one waits for their work: see steps.ahead_of_device.
"""

import re
from collections.abc import Callable

from tprimat.logs.fields import MAXTEXT_OPTIONS, LineFields, capacity, count, number, plain, truth, whole

NAME = "maxtext"
SIGNS = (("completed step:", "seconds:"),)

FIELD = re.compile(r"(?<![\w/])([\w/]+(?: step)?): ([^,\s]+)")
SETTING = re.compile(r"Config param (\w+): (\S+)")
SETTINGS = {"max_target_length": "sequence_tokens", "global_batch_size_to_train_on": "global_batch_sequences"}
SHAPE = {
    "num_decoder_layers": "num_layers",
    "emb_dim": "hidden_size",
    "mlp_dim": "ffn_hidden_size",
    "num_query_heads": "num_attention_heads",
    "num_kv_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "mtp_num_layers": "mtp_num_layers",
}
"""MaxText's settings that describe the model -> Megatron's arguments."""
ARITHMETIC = {
    "weight_dtype": {"use_precision_aware_optimizer": "True", "main_params_dtype": "{}", "exp_avg_sq_dtype": "{}"},
    "mu_dtype": {"exp_avg_dtype": "{}"},
    **{name: {name: "{}"} for name in sorted(MAXTEXT_OPTIONS)},
}
"""Setting -> Megatron's arguments that say the same of how a step computes, or the option itself."""
FACTS: dict[str, tuple[str, Callable[[str], object]]] = {
    "opt_type": ("optimizer", str),
    "grad_dtype": ("gradient_dtype", str),
    "attention": ("attention", str),
    "use_random_routing": ("routing", lambda value: "balanced" if truth(value) else "natural"),
    "capacity_factor": ("expert_capacity", capacity),
    "remat_policy": ("recompute", lambda value: value if value in {"full", "none"} else "selective"),
    "dtype": ("matmul_dtype", lambda value: {"bfloat16": "bf16", "float32": "fp32"}.get(value, value)),
}
"""Setting -> field of the evidence, and what its text says of it."""
ENUM = re.compile(r"[A-Z]\w+\.([A-Z]\w*)")
"""A value as newer versions print it: AttentionType.LOCAL_SLIDING, QuantizationType.NONE."""
WINDOWED = {
    "attention_type": {"local_sliding", "chunk"},
    "decoder_block": {"gemma2", "gemma3", "gpt_oss", "llama4"},
    "moba": {"true"},
    "use_sparse_indexer": {"true"},
}
"""Setting -> its values with which attention is within a window, in some layers at least."""
QUANTIZED = ("fp8", "fp4", "int8", "int4")
RECIPES = {
    "te_fp8_delayedscaling": {"fp8_recipe": "delayed"},
    "te_fp8_currentscaling": {"fp8_recipe": "current"},
    "te_mxfp8": {"fp8_recipe": "mxfp8"},
    "te_nvfp4": {"fp4_recipe": "nvfp4"},
}
"""Quantization by Transformer Engine -> Megatron's argument that says how it scales."""
DEVICES = re.compile(r"Num_devices: (\d+)")
MARKS = ("completed step:", "Config param", "Num_devices")


def read_line(text: str) -> LineFields | None:
    """Return the fields of a line; None where it has none."""
    if "completed step:" in text:
        return read_step(plain(text))
    if "Config param" in text and (match := SETTING.search(text)):
        return read_setting(match[1], match[2])
    if "Num_devices" in text and (match := DEVICES.search(text)):
        return LineFields(evidence={"world_size": count(match[1])})
    return None


def read_setting(name: str, value: str) -> LineFields | None:
    """Return one row of the configuration."""
    if member := ENUM.fullmatch(value):
        value = member[1].lower()
    if name == "steps":
        return LineFields(total_steps=whole(value))
    if name in SETTINGS and (setting := whole(value)) is not None:
        return LineFields(evidence={SETTINGS[name]: setting})
    if name in SHAPE:
        return LineFields(arguments={SHAPE[name]: "None" if (name, value) == ("num_experts", "1") else value})
    if name in WINDOWED:
        return LineFields(arguments={"window_size": value}) if value.lower() in WINDOWED[name] else None
    evidence: dict[str, object] = {}
    if name == "quantization" and (dtype := quantized(value)):
        evidence["matmul_dtype"] = dtype
    if name == "dataset_type" and value == "synthetic":
        evidence["data"] = "mock"
    if name in FACTS:
        fact, read = FACTS[name]
        evidence[fact] = read(value)
    arguments = {argument: text.format(value) for argument, text in ARITHMETIC.get(name, {}).items()}
    arguments |= RECIPES.get(value, {}) if name == "quantization" else {}
    return LineFields(evidence=evidence, arguments=arguments) if evidence or arguments else None


def quantized(value: str) -> str | None:
    """Return the dtype of products in 'fp8_full', 'int8' or 'intmp'; None where they keep `dtype`."""
    return next((dtype for dtype in QUANTIZED if dtype in value), value if value not in {"", "None", "none"} else None)


def read_step(text: str) -> LineFields | None:
    """Return one step."""
    fields = dict(FIELD.findall(text[text.index("completed step:") :]))
    step = whole(fields.get("completed step"))
    if step is None:
        return None
    return LineFields(
        step=step + 1,
        step_seconds=number(fields.get("seconds")),
        dispatched=True,
        tokens_per_second_per_gpu=number(fields.get("Tokens/s/device")),
        tflops_per_gpu=number(fields.get("TFLOP/s/device")),
        loss=number(fields.get("loss") or fields.get("main_model_loss")),
        target_tokens=whole(fields.get("total_weights")),
        arguments={"mtp_num_layers": "1"} if "main_model_loss" in fields else {},  # which it has with multi-token prediction only
    )
