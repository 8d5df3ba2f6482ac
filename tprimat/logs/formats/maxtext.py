"""MaxText (JAX): 'completed step: 9, seconds: 5.667, …, loss: …'. Steps count from 0.

The first times cover dispatch only, and the next one waits for their work: see steps.ahead_of_device.
"""

import re

from tprimat.logs.fields import LineFields, count, number, plain, whole

NAME = "maxtext"
SIGNS = (("completed step:", "seconds:"),)

FIELD = re.compile(r"([\w/]+(?: step)?): ([^,\s]+)")
SETTING = re.compile(r"Config param (\w+): (\S+)")
SETTINGS = {"max_target_length": "sequence_tokens", "global_batch_size_to_train_on": "global_batch_sequences"}
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
    if name == "quantization" and "fp8" in value:
        return LineFields(evidence={"matmul_dtype": "fp8"})
    if name == "dtype":
        return LineFields(evidence={"matmul_dtype": {"bfloat16": "bf16", "float32": "fp32"}.get(value, value)})
    return None


def read_step(text: str) -> LineFields | None:
    """Return one step."""
    fields = dict(FIELD.findall(text))
    step = whole(fields.get("completed step"))
    if step is None:
        return None
    return LineFields(
        step=step + 1,
        step_seconds=number(fields.get("seconds")),
        dispatched=True,
        tokens_per_second_per_gpu=number(fields.get("Tokens/s/device")),
        tflops_per_gpu=number(fields.get("TFLOP/s/device")),
        loss=number(fields.get("loss")),
    )
