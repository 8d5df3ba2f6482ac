"""MaxText (JAX): 'completed step: 9, seconds: 5.667, …, loss: …'. Steps count from 0.

JAX returns from a step before the device has run it. The times of the second and third step may cover their dispatch only, or
wait for the work of those before: they are not read.
"""

import re
from collections.abc import Callable

from tprimat.logs.arguments import OPTIONS_OF
from tprimat.logs.fields import Dialect, LineFields, capacity, matching, number, states, truth, whole

DISPATCHED = (1, 2)
"""Steps whose times may be those of their dispatch."""
FIELD = re.compile(r"(?<![\w/])([\w/]+(?: step)?): ([^,\s]+)")
SIZES = {"max_target_length": "sequence_tokens", "global_batch_size_to_train_on": "global_batch_sequences"}
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
    "weight_dtype": ("main_params_dtype", "exp_avg_sq_dtype"),
    "mu_dtype": ("exp_avg_dtype",),
    **{name: (name,) for name in OPTIONS_OF["maxtext"]},
}
"""Setting -> Megatron's arguments that say the same of how a step computes, or the option itself."""
QUANTIZED = ("fp8", "fp4", "int8", "int4")


def quantized(value: str) -> str | None:
    """Return the dtype of products in 'fp8_full', 'int8' or 'intmp'; None where they keep `dtype`."""
    return next((dtype for dtype in QUANTIZED if dtype in value), None if value in {"", "None", "none"} else value)


FACTS: dict[str, tuple[str, Callable[[str], object]]] = {
    "opt_type": ("optimizer", str),
    "grad_dtype": ("gradient_dtype", str),
    "attention": ("attention", str),
    "use_random_routing": ("routing", lambda value: "balanced" if truth(value) else "natural"),
    "capacity_factor": ("expert_capacity", capacity),
    "remat_policy": ("recompute", lambda value: value if value in {"full", "none"} else "selective"),
    "dtype": ("matmul_dtype", lambda value: {"bfloat16": "bf16", "float32": "fp32"}.get(value, value)),
    "quantization": ("matmul_dtype", quantized),
    "dataset_type": ("data", lambda value: "mock" if value == "synthetic" else None),
}
"""Setting -> field of the evidence, and what its text says of it; None: nothing."""
ENUM = re.compile(r"[A-Z]\w+\.([A-Z]\w*)")
"""A value as newer versions print it: AttentionType.LOCAL_SLIDING, QuantizationType.NONE."""
WINDOWED = {
    "attention_type": {"local_sliding", "chunk"},
    "decoder_block": {"gemma2", "gemma3", "gpt_oss", "llama4"},
    "moba": {"true"},
    "use_sparse_indexer": {"true"},
}
"""Setting -> its values with which attention is within a window, in some layers at least."""
RECIPES = {
    "te_fp8_delayedscaling": {"fp8_recipe": "delayed"},
    "te_fp8_currentscaling": {"fp8_recipe": "current"},
    "te_mxfp8": {"fp8_recipe": "mxfp8"},
    "te_nvfp4": {"fp4_recipe": "nvfp4"},
}
"""Quantization by Transformer Engine -> Megatron's argument that says how it scales."""


def read_setting(match: re.Match[str]) -> LineFields | None:
    """Return one row of the configuration."""
    name, value = match.groups()
    if member := ENUM.fullmatch(value):
        value = member[1].lower()
    if name == "steps":
        return LineFields(total_steps=whole(value))
    if name in SIZES and (size := whole(value)) is not None:
        return LineFields(evidence={SIZES[name]: size})
    if name in SHAPE:
        return LineFields(arguments={SHAPE[name]: "None" if (name, value) == ("num_experts", "1") else value})
    if name in WINDOWED:
        return LineFields(arguments={"window_size": value}) if value.lower() in WINDOWED[name] else None
    fact, read = FACTS.get(name, ("", lambda _: None))
    evidence = {} if (said := read(value)) is None else {fact: said}
    arguments = dict.fromkeys(ARITHMETIC.get(name, ()), value)
    arguments |= {"use_precision_aware_optimizer": "True"} if name == "weight_dtype" else {}
    arguments |= RECIPES.get(value, {}) if name == "quantization" else {}
    return LineFields(evidence=evidence, arguments=arguments) if evidence or arguments else None


def read_step(text: str) -> LineFields | None:
    """Return one step."""
    fields = dict(FIELD.findall(text[text.index("completed step:") :]))
    step = whole(fields.get("completed step"))
    if step is None:
        return None
    return LineFields(
        step=step + 1,
        step_seconds=None if step in DISPATCHED else number(fields.get("seconds")),
        tokens_per_second_per_gpu=None if step in DISPATCHED else number(fields.get("Tokens/s/device")),
        tflops_per_gpu=number(fields.get("TFLOP/s/device")),
        loss=number(fields.get("loss") or fields.get("main_model_loss")),
        target_tokens=whole(fields.get("total_weights")),
        arguments={"mtp_num_layers": "1"} if "main_model_loss" in fields else {},  # which it has with multi-token prediction only
    )


DIALECT = Dialect(
    name="maxtext",
    signs=(("completed step:", "seconds:"),),
    rules={
        "completed step:": read_step,
        "Config param": matching(r"Config param (\w+): (\S+)", read_setting),
        "Num_devices": states("world_size", r"Num_devices: (\d+)"),
    },
    marks_its_end=False,
)
