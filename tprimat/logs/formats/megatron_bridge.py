"""Megatron-Bridge (NVIDIA): Megatron-LM's line after a `Step Time` line, settings as YAML, memory in GB of 1e9 bytes."""

import re

from tprimat.logs.fields import (
    GIGABYTE,
    KEPT_ARGUMENTS,
    LAUNCHER_PREFIX,
    OPTION_ARGUMENTS,
    LineFields,
    count,
    in_bytes,
    number,
    plain,
)
from tprimat.logs.formats import megatron_lm

NAME = "megatron-bridge"
SIGNS = (("MODEL_TFLOP/s/GPU",), ("Step Time :", "GPU utilization:"), ("mem-max-allocated-gigabytes:",))

MEMORY = re.compile(r"\(after (\d+) iterations\) memory \(GB\)")
SETTING = re.compile(r"(?:^|\s)(\w+): (\S+)\s*$")
SETTINGS = ("parallel_size: ", "batch_size: ", "seq_length: ", "bf16: ", "fp8: ")
SECTION_SETTING = re.compile(LAUNCHER_PREFIX + r"  (\w+): (\S+)\s*$")
"""A key of a section such as `model`; the nested ones of other models are indented further."""
RENAMED = {"num_moe_experts": "num_experts", "gated_linear_unit": "swiglu"}
READ = KEPT_ARGUMENTS | {"moe_router_force_load_balancing", "optimizer", "recompute_granularity", "sequence_parallel"}
UNSET = {"null", "None"}
"""Values of settings that one section leaves to another, as `comm_overlap` to `ddp`."""
SECTION_MARKS = tuple(f"  {name}: " for name in (*sorted(READ), *RENAMED))
TFLOPS = re.compile(r"(?<![\d.])([\d.]+)\s*(?:MODEL_)?TFLOP/s/GPU")
"""Without MODEL_ in 2025."""
MARKS = (
    *megatron_lm.MARKS,
    "mem-max-allocated-gigabytes",
    "GPU utilization:",
    "peft.lora",
    "Adding lora to",
    "packed_sequence_size: ",
    *SETTINGS,
    *SECTION_MARKS,
)


def read_line(text: str) -> LineFields | None:
    """Return the fields of a line; None where it has none.

    The Step Time line repeats the time of the iteration line after it with fewer digits; its TFLOP/s are those of that step.
    """
    if "mem-max-allocated-gigabytes" in text:
        return read_memory(plain(text))
    if "GPU utilization:" in text and "elapsed time" not in text:
        return LineFields(tflops_per_gpu=number(match[1])) if (match := TFLOPS.search(text)) else None
    if "peft.lora" in text or "Adding lora to" in text:
        return LineFields(arguments={"peft": "lora"})
    if "packed_sequence_size: " in text and (match := SETTING.search(plain(text))):
        return LineFields(arguments={match[1]: match[2]})
    if match := SECTION_SETTING.match(plain(text)):
        name = RENAMED.get(match[1], match[1])
        if name in READ and not (name in OPTION_ARGUMENTS and match[2] in UNSET):
            return megatron_lm.argument(name, match[2])
    if any(setting in text for setting in SETTINGS) and "elapsed time" not in text:
        match = SETTING.search(plain(text))
        return megatron_lm.argument(match[1], match[2]) if match else None
    return megatron_lm.read_line(text)


def read_memory(text: str) -> LineFields | None:
    """Read '[Rank 0] (after 2 iterations) memory (GB) | … | mem-max-allocated-gigabytes: 153.4 | …'."""
    match = MEMORY.search(text)
    if match is None:
        return None
    fields = megatron_lm.pairs(text[match.end() :])
    return LineFields(
        step=count(match[1]),
        peak_allocated_bytes=in_bytes(number(fields.get("mem-max-allocated-gigabytes")), GIGABYTE),
        peak_reserved_bytes=in_bytes(number(fields.get("mem-max-reserved-gigabytes")), GIGABYTE),
    )
