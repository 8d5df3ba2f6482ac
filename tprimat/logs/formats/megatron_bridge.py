"""Megatron-Bridge (NVIDIA): Megatron-LM's line after a `Step Time` line, settings as YAML, memory in GB of 1e9 bytes."""

import re

from tprimat.logs.arguments import KEPT, OPTIONS, argument
from tprimat.logs.fields import GIGABYTE, LAUNCHER_PREFIX, NONE, Dialect, LineFields, count, in_bytes, matching, number, rules_of
from tprimat.logs.formats import megatron_lm

RENAMED = {"num_moe_experts": "num_experts", "gated_linear_unit": "swiglu"}
SETTINGS = ("parallel_size: ", "batch_size: ", "seq_length: ", "bf16: ", "fp8: ")
READ = KEPT | {"moe_router_force_load_balancing", "optimizer", "recompute_granularity", "sequence_parallel"}


def read_memory(match: re.Match[str]) -> LineFields:
    """Read '[Rank 0] (after 2 iterations) memory (GB) | … | mem-max-allocated-gigabytes: 153.4 | …'."""
    fields = megatron_lm.pairs(match.string[match.end() :])
    return LineFields(
        step=count(match[1]),
        peak_allocated_bytes=in_bytes(fields.get("mem-max-allocated-gigabytes"), GIGABYTE),
        peak_reserved_bytes=in_bytes(fields.get("mem-max-reserved-gigabytes"), GIGABYTE),
    )


def read_setting(match: re.Match[str]) -> LineFields | None:
    """Read a key of a section such as `model`, unless it leaves its value to another section, as `comm_overlap` to `ddp`."""
    name = RENAMED.get(match[1], match[1])
    return argument(name, match[2]) if name in READ and not (name in OPTIONS and match[2] in NONE) else None


SETTING = matching(r"(?:^|\s)(\w+): (\S+)\s*$", lambda match: argument(match[1], match[2]))
# The nested keys of other models are indented further.
SECTION = matching(LAUNCHER_PREFIX + r"  (\w+): (\S+)\s*$", read_setting)
STEP_RULES = {
    "mem-max-allocated-gigabytes": matching(r"\(after (\d+) iterations\) memory \(GB\)", read_memory),
    **megatron_lm.RULES,
    # Without MODEL_ in 2025. It repeats the time of the iteration line after it with fewer digits.
    "GPU utilization:": matching(
        r"(?<![\d.])([\d.]+)\s*(?:MODEL_)?TFLOP/s/GPU", lambda match: LineFields(tflops_per_gpu=number(match[1]))
    ),
}
MEGATRON_LM = Dialect(name="megatron-lm", signs=megatron_lm.SIGNS, rules=STEP_RULES)
"""Reads the steps of Megatron-Bridge too: of two ranks, the one that prints Megatron-LM's line alone may speak first."""
DIALECT = Dialect(
    name="megatron-bridge",
    signs=(("MODEL_TFLOP/s/GPU",), ("Step Time :", "GPU utilization:"), ("mem-max-allocated-gigabytes:",)),
    rules={
        **STEP_RULES,
        **rules_of("megatron-bridge"),
        "packed_sequence_size: ": SETTING,
        **dict.fromkeys([f"  {name}: " for name in sorted(READ | RENAMED.keys())], SECTION),
        **dict.fromkeys(SETTINGS, SETTING),
    },
)
