"""Primus (AMD) over Megatron or torchtitan: the Megatron-LM line behind a coloured prefix, in eight wordings over its versions.

Sources: primus/core/utils/logger.py (prefix), primus/backends/megatron/patches/training_log/print_rank_last_patches.py (core
runtime), primus/modules/trainer/megatron/trainer.py (legacy). GB in the log are GiB.
"""

import re

from tprimat.logs.arguments import argument
from tprimat.logs.fields import GIBIBYTE, Dialect, LineFields, count, in_bytes, matching, rules_of
from tprimat.logs.formats import megatron_lm

WORLD = re.compile(r"\[rank-\d+/(\d+)\]")
DEVICE_MEMORY = "hip mem usage/free/total/usage_ratio: "
TYPES = ("(int)", "(float)", "(bool)", "(str)", "(list)", "(NoneType)")
"""Of the values of the resolved module configuration: '  name   : value (type)'."""


def read_iteration(text: str) -> LineFields | None:
    """Read the iteration line, with the world size from its prefix and the memory in use on the last rank's device.

    `rocm mem usage` is ignored: Primus takes it after iterations 1 and 2 and then repeats it.
    """
    world = WORLD.search(text)
    return megatron_lm.read_iteration(
        text,
        evidence={"world_size": count(world[1])} if world else {},
        device_used_bytes=in_bytes(text.partition(DEVICE_MEMORY)[2], GIBIBYTE),
    )


def read_setting(match: re.Match[str]) -> LineFields | None:
    """Read one row of the module configuration."""
    if match[1] == "lora.enabled":
        return LineFields(arguments={"peft": "lora"}) if match[2] == "True" else None
    return argument(match[1], match[2])


SETTING = matching(r"(?<![\w.-])(lora\.enabled|\w+)\s+: (\[[^\]]*\]|\S+) \((?:int|float|bool|str|list|NoneType)\)", read_setting)
DIALECT = Dialect(
    name="primus",
    signs=(("elapsed time per iteration", "rank-"), ("elapsed time per iteration", "hip mem usage")),
    rules={"elapsed time per iteration": read_iteration}
    | dict.fromkeys(TYPES, SETTING)
    | rules_of("primus")
    | {words: read for words, read in megatron_lm.RULES.items() if words != "elapsed time per iteration"},
    platform="rocm",
)
