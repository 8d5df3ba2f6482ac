"""MaxText (JAX): 'completed step: 9, seconds: 5.667, …, loss: …'. Steps count from 0; the first times only dispatch."""

import re

from tprimat.logs.fields import LineFields
from tprimat.logs.values import number, plain, scaled, whole
from tprimat.units import TERA

NAME = "maxtext"
SIGNS = (("completed step:", "seconds:"),)

FIELD = re.compile(r"([\w/]+(?: step)?): ([^,\s]+)")
SETTING = re.compile(r"Config param (\w+): (\S+)")
SETTINGS = {"max_target_length": "sequence_tokens", "global_batch_size_to_train_on": "global_batch_sequences"}
DEVICES = re.compile(r"Num_devices: (\d+)")


def read_line(text: str) -> LineFields | None:
    """What the line says; None when nothing."""
    if "completed step:" in text:
        return read_step(plain(text))
    if "Config param" in text and (match := SETTING.search(text)):
        return read_setting(match[1], match[2])
    if "Num_devices" in text and (match := DEVICES.search(text)):
        return LineFields(evidence={"world_size": int(match[1])})
    return None


def read_setting(name: str, value: str) -> LineFields | None:
    """One row of the configuration."""
    if name == "steps":
        return LineFields(total_steps=whole(value))
    if name in SETTINGS and (count := whole(value)) is not None:
        return LineFields(evidence={SETTINGS[name]: count})
    if name == "quantization" and "fp8" in value:
        return LineFields(evidence={"matmul_dtype": "fp8"})
    if name == "dtype":
        return LineFields(evidence={"matmul_dtype": {"bfloat16": "bf16", "float32": "fp32"}.get(value, value)})
    return None


def read_step(text: str) -> LineFields | None:
    """One step."""
    fields = dict(FIELD.findall(text))
    step = whole(fields.get("completed step"))
    if step is None:
        return None
    return LineFields(
        step=step + 1,
        step_seconds=number(fields.get("seconds")),
        tokens_per_second_per_gpu=number(fields.get("Tokens/s/device")),
        model_flops_per_second_per_gpu=scaled(number(fields.get("TFLOP/s/device")), TERA),
        loss=number(fields.get("loss")),
    )
