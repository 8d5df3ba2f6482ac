"""MaxText (JAX): 'completed step: 9, seconds: 5.667, …, loss: …'. Steps count from 0.

JAX returns from a step before the device has run it. The times of the second and third step may cover their dispatch only, or
wait for the work of those before: they are not read.
"""

import re
from collections.abc import Callable

from tprimat.logs.arguments import MAXTEXT, OPTIONS_OF
from tprimat.logs.fields import GIBIBYTE, Dialect, LineFields, capacity, in_bytes, matching, rules_of, stated, whole

FIELD = re.compile(r"(?<![\w/])([\w/]+(?: step)?): ([^,\s]+)")
QUANTIZED = ("fp8", "fp4", "int8", "int4")


def quantized(value: str) -> str | None:
    """Return the dtype of products in 'fp8_full', 'int8' or 'intmp'; None where they keep `dtype`."""
    return next((dtype for dtype in QUANTIZED if dtype in value), None if value in {"", "None", "none"} else value)


READ: dict[str, Callable[[str], object]] = {"capacity_factor": capacity, "quantization": quantized}
"""Setting -> what its text says; a whole number where it is one for others."""


def _read_setting(match: re.Match[str]) -> LineFields | None:
    name, value = match.groups()
    if member := re.fullmatch(r"[A-Z]\w+\.([A-Z]\w*)", value):  # AttentionType.LOCAL_SLIDING in newer versions
        value = member[1].lower()
    if name == "steps":
        return LineFields(total_steps=whole(value))
    if name in MAXTEXT["shape"]:
        return LineFields(arguments={MAXTEXT["shape"][name]: "None" if (name, value) == ("num_experts", "1") else value})
    if name == "mlp_activations":
        return LineFields(arguments={"swiglu": str("silu" in value and "linear" in value)})
    if name in MAXTEXT["windowed"]:
        return LineFields(arguments={"window_size": value}) if value.lower() in MAXTEXT["windowed"][name] else None
    meanings = MAXTEXT["meanings"].get(name, {})
    text = meanings.get(value.lower(), meanings.get("other", value))
    said = text and name in MAXTEXT["facts"] and (READ[name](text) if name in READ else whole(text) or text)
    evidence = {MAXTEXT["facts"][name]: said} if said else {}
    arguments = dict.fromkeys(MAXTEXT["states"].get(name, ()), value)
    arguments |= {name: value} if name in OPTIONS_OF["maxtext"] else {}
    arguments |= {"use_precision_aware_optimizer": "True"} if name == "weight_dtype" else {}
    arguments |= MAXTEXT["recipes"].get(value, {}) if name == "quantization" else {}
    return LineFields(evidence=evidence, arguments=arguments) if evidence or arguments else None


def read_step(text: str) -> LineFields | None:
    """Return one step."""
    fields = dict(FIELD.findall("".join(text.partition("completed step:")[1:])))
    step = whole(fields.get("completed step"))
    if step is None:
        return None
    values = stated(fields)
    if step in {1, 2}:  # whose times may be those of their dispatch
        values |= dict.fromkeys(("step_seconds", "tokens_per_second_per_gpu", "tokens_per_second"))
    # It has a main_model_loss with multi-token prediction only.
    return LineFields(step=step + 1, arguments={"mtp_num_layers": "1"} if "main_model_loss" in fields else {}, **values)


DIALECT = Dialect(
    name="maxtext",
    signs=(("completed step:", "seconds:"), ("completed step:", "/s/device:")),
    rules={
        "completed step:": read_step,
        "Config param": matching(r"Config param (\w+): (\[[^\]]*\]|\S+)", _read_setting),
        "Using (GB)": matching(  # which are GiB
            r"Using \(GB\) ([\d.]+) /", lambda match: LineFields(device_used_bytes=in_bytes(match[1], GIBIBYTE))
        ),
        **rules_of("maxtext"),
    },
    marks_its_end=False,
)
