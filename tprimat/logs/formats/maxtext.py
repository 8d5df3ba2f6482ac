"""MaxText (JAX): 'completed step: 9, seconds: 5.667, …, loss: …'. Steps count from 0.

The first times cover dispatch only, and the next one waits for their work: see steps.ahead_of_device.
"""

import re

from tprimat.logs.fields import LineFields, count, number, plain, whole

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
}
"""MaxText's settings that describe the model -> Megatron's arguments."""
WINDOWED = {"local_sliding", "chunk"}
"""Kinds of attention within a window."""
QUANTIZED = ("fp8", "int8", "int4")
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
    if name == "steps":
        return LineFields(total_steps=whole(value))
    if name in SETTINGS and (setting := whole(value)) is not None:
        return LineFields(evidence={SETTINGS[name]: setting})
    if name in SHAPE:
        return LineFields(arguments={SHAPE[name]: "None" if (name, value) == ("num_experts", "1") else value})
    if name == "attention_type":
        return LineFields(arguments={"window_size": value}) if value in WINDOWED else None
    if name == "quantization":
        return LineFields(evidence={"matmul_dtype": dtype}) if (dtype := quantized(value)) else None
    if name == "dtype":
        return LineFields(evidence={"matmul_dtype": {"bfloat16": "bf16", "float32": "fp32"}.get(value, value)})
    return None


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
