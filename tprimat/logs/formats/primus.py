"""Primus (AMD) over Megatron or torchtitan: the Megatron-LM line behind a coloured prefix, in eight wordings over its versions.

Sources: primus/core/utils/logger.py (prefix), primus/backends/megatron/patches/training_log/print_rank_last_patches.py (core
runtime), primus/modules/trainer/megatron/trainer.py (legacy). GB in the log are GiB.
"""

import re

from tprimat.logs.fields import GIBIBYTE, LineFields, count, in_bytes, number, plain
from tprimat.logs.formats import megatron_lm

NAME = "primus"
SIGNS = (("elapsed time per iteration", "rank-"), ("elapsed time per iteration", "hip mem usage"))
PLATFORM = "rocm"
"""Primus runs on AMD accelerators only."""

WORLD = re.compile(r"\[rank-\d+/(\d+)\]")
SETTING = re.compile(r"(?<![\w.-])(\w+)\s+: (\[[^\]]*\]|\S+) \((?:int|float|bool|str|list|NoneType)\)")
DEVICE_MEMORY = "hip mem usage/free/total/usage_ratio"
KINDS = ("(int)", "(float)", "(bool)", "(str)", "(list)", "(NoneType)")
ADAPTERS = ("Applying LoRA with", "Adding lora to")
MARKS = (*megatron_lm.MARKS, *KINDS, *ADAPTERS, "Training completed.")


def read_line(text: str) -> LineFields | None:
    """Return the fields of a line; None where it has none.

    The `rocm mem usage` field is ignored: Primus takes it after iterations 1 and 2 and then repeats it.
    """
    if "elapsed time per iteration" in text:
        return read_iteration(plain(text))
    if any(kind in text for kind in KINDS):
        return read_setting(plain(text))
    if any(words in text for words in ADAPTERS):
        return LineFields(arguments={"peft": "lora"})
    if "Training completed." in text:
        return LineFields(finished=True)
    return megatron_lm.read_line(text)


def read_iteration(text: str) -> LineFields | None:
    """Read the iteration line, with the world size from its prefix and the memory in use on the last rank's device."""
    world = WORLD.search(text)
    return megatron_lm.read_iteration(
        text,
        evidence={"world_size": count(world[1])} if world else {},
        device_used_bytes=in_bytes(number(text.partition(f"{DEVICE_MEMORY}: ")[2]), GIBIBYTE),
    )


def read_setting(text: str) -> LineFields | None:
    """Read one row of the resolved module configuration: '  name   : value (type)'."""
    if "lora.enabled" in text:
        return LineFields(arguments={"peft": "lora"}) if ": True (bool)" in text else None
    match = SETTING.search(text)
    return megatron_lm.argument(match[1], match[2]) if match else None
