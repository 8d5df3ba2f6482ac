"""What all dialects share: terminal colours off, numbers as logs print them, arguments to evidence."""

import math
import re
from collections.abc import Mapping
from typing import Any

from tprimat.units import TERA

GIBIBYTE = 2**30
MEBIBYTE = 2**20

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
LEADING_NUMBER = re.compile(r"\s*([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf))", re.IGNORECASE)
HUMAN_SUFFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": TERA}


def plain(text: str) -> str:
    """The line without terminal colours."""
    return ANSI.sub("", text) if "\x1b" in text else text


def number(text: str | None) -> float | None:
    """'9836.3/21761.7', ' 4,376', '1.0E-05', 'nan', '119.02GiB' -> the leading number; None for 'N/A' and torn text."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        match = LEADING_NUMBER.match(text)
        return float(match[1].replace(",", "")) if match else None


def whole(text: str | None) -> int | None:
    """The leading number when it is a whole one."""
    value = number(text)
    return int(value) if value is not None and math.isfinite(value) and value == int(value) else None


def human(text: str | None) -> float | None:
    """'7.79K' -> 7790.0, as nanotron's human_format writes; plain numbers as they are."""
    value = number(text)
    if value is None or text is None:
        return None
    return value * HUMAN_SUFFIXES.get(text.strip()[-1:].upper(), 1.0)


def scaled(value: float | None, factor: float) -> float | None:
    """A unit change that keeps what is absent absent."""
    return None if value is None else value * factor


def in_bytes(value: float | None, unit: int) -> int | None:
    """Memory in bytes."""
    return None if value is None or not math.isfinite(value) else round(value * unit)


def truth(text: str) -> bool | None:
    """'True' and 'false' as Python and YAML print them."""
    return {"true": True, "false": False}.get(text.strip().lower())


WHOLE_ARGUMENTS = {
    "world_size": "world_size",
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "data_parallel_size": "data_parallel",
    "micro_batch_size": "micro_batch_sequences",
    "global_batch_size": "global_batch_sequences",
    "seq_length": "sequence_tokens",
}
"""Megatron's argument -> field of record.schema.Evidence."""


def megatron_argument(name: str, value: str) -> Mapping[str, Any]:
    """One Megatron argument as evidence; empty when it says nothing that a record keeps."""
    value = value.strip()
    if name in WHOLE_ARGUMENTS:
        count = whole(value)
        return {} if count is None else {WHOLE_ARGUMENTS[name]: count}
    if name in {"bf16", "fp16"}:
        return {"matmul_dtype": name} if truth(value) else {}
    if name == "fp8":
        return {"matmul_dtype": "fp8"} if value.lower() in {"hybrid", "e4m3"} else {}
    if name == "params_dtype":
        return {"parameter_dtype": value.removeprefix("torch.")}
    if name == "sequence_parallel":
        return {"sequence_parallel": flag} if (flag := truth(value)) is not None else {}
    if name == "transformer_impl":
        return {"transformer_engine": value == "transformer_engine"}
    if name == "mock_data":
        return {"data": "mock"} if truth(value) else {}
    if name == "optimizer":
        return {"optimizer": value}
    return {}
