"""Megatron-Bridge (NVIDIA): Megatron-LM's line after a `Step Time` line, settings as YAML, memory in GB of 1e9 bytes."""

import re

from tprimat.logs.fields import GIGABYTE, LineFields, count, in_bytes, number, plain
from tprimat.logs.formats import megatron_lm

NAME = "megatron-bridge"
SIGNS = (("MODEL_TFLOP/s/GPU",), ("mem-max-allocated-gigabytes:",))

MEMORY = re.compile(r"\(after (\d+) iterations\) memory \(GB\)")
SETTING = re.compile(r"(?:^|\s)(\w+): (\S+)\s*$")
SETTINGS = ("parallel_size: ", "batch_size: ", "seq_length: ", "bf16: ", "fp8: ")
MARKS = (*megatron_lm.MARKS, "mem-max-allocated-gigabytes", *SETTINGS)


def read_line(text: str) -> LineFields | None:
    """Return the fields of a line; None where it has none. The Step Time line repeats the iteration line with fewer digits."""
    if "mem-max-allocated-gigabytes" in text:
        return read_memory(plain(text))
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
