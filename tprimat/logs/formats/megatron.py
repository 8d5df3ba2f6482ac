"""Megatron-LM: the iteration line, the argument dump and the memory report (megatron/training/training.py, arguments.py).

Megatron-Bridge, Primus, NeMo 2 and TPrimat print the same lines with additions, or fields in the same form.
"""

import re
from typing import Any

from tprimat.core.errors import RecordError
from tprimat.logs.arguments import KEPT, OPTIONS, OTHER_WORK, argument
from tprimat.logs.fields import (
    GIBIBYTE,
    LAUNCHER_PREFIX,
    NONE,
    Dialect,
    LineFields,
    count,
    in_bytes,
    matching,
    pairs,
    rules_of,
    stated,
    whole,
)
from tprimat.records.schema import RunRecord
from tprimat.records.store import RUN_LINE, from_json

SIZE = re.compile(r"(?<![\w-])(world|data|context|tensor|pipeline)(?:-model)?(-parallel|) size: (\d+)")
RANK_PARAMETERS = "parameters of rank"
"""How the evidence of such a line begins; its end names the rank."""


def read_iteration(text: str, sign: str = ": ", **others: Any) -> LineFields | None:
    """Read the iteration line of Megatron-LM and its derivatives; `others` are fields that only a derivative's line has.

    `X/Y` is the value of this iteration and an average over several; the average is ignored. A time without `/Y` is itself a
    mean since the last line that reset the timer, and the first line of a process resets nothing: see times.correct_second.
    """
    match = re.search(r"iteration[\s=]+(\d+)/\s*(\d+)", text)
    if match is None:
        return None
    parts = pairs(text[match.end() : text.rfind("|")], sign)  # what no bar closes may be torn in a number
    further = [count(digits) for digits in re.findall(r"mtp_(\d+) loss: ", text)]
    counted = [whole(parts.get(f"number of {kind} iterations")) for kind in ("skipped", "nan")]
    if counted[1] and "lm loss" not in parts:
        parts["lm loss"] = "nan"
    fields = {"mean_since_reset": "/" not in parts.get("elapsed time per iteration (ms)", "/"), **stated(parts), **others}
    return LineFields(
        step=count(match[1]),
        total_steps=count(match[2]),
        failed=any(counted),
        arguments=({"mtp_num_layers": str(max(further))} if further else {})
        | dict.fromkeys((OTHER_WORK.keys() | {"load balancing loss"}) & parts.keys(), "printed"),
        **fields,
    )


FLAG = re.compile(r"--([a-z][\w-]+)(?:[= ](?!--)(\S+))?")


def read_command(text: str) -> LineFields:
    """Read the command that starts Megatron-LM, where a shell or a launcher prints it; a flag without a value is a switch."""
    given = [argument(name.replace("-", "_"), value or "True") for name, value in FLAG.findall(text)]
    known = [fields for fields in given if fields is not None]
    return LineFields(
        total_steps=next((fields.total_steps for fields in known if fields.total_steps), None),
        arguments={name: value for fields in known for name, value in fields.arguments.items()},
        evidence={name: value for fields in known for name, value in fields.evidence.items()},
    )


# '[Rank 0] (after 2 iterations) memory (MB) | allocated: … | max allocated: …': the allocator's peak so far.
MEMORY = matching(
    r"\(after (\d+) iterations\) memory \([MG]B\)",
    lambda match: LineFields(step=count(match[1]), **stated(pairs(match.string[match.end() :]))),
)


RULES = {
    "elapsed time per iteration": read_iteration,
    "| lm loss:": read_iteration,  # of programs that print a rate, and no time
    "max allocated": MEMORY,
    " --num-layers ": read_command,
    " ..": matching(r"\b(\w+) \.{2,} (\[[^\]]*\](?=\s|$)|\S+)", lambda match: argument(match[1], match[2])),
    "using world size": lambda text: LineFields(
        evidence={f"{name}{kind.replace('-', '_') or '_size'}": count(digits) for name, kind, digits in SIZE.findall(text)}
    ),
    # The parameters of one rank, which add up where all ranks print theirs; '(tensor, gtp_remat, pipeline)' since core 0.19.
    "number of parameters on": matching(
        r"number of parameters on \(tensor,[\w ,]* pipeline\) model parallel rank \(([\d, ]+)\): (\d+)",
        lambda match: LineFields(evidence={f"{RANK_PARAMETERS} {match[1]}": count(match[2])}),
    ),
    **rules_of("megatron"),
}


# Megatron-Bridge (NVIDIA): the iteration line after a `Step Time` line, settings as YAML, memory in GB of 1e9 bytes.

RENAMED = {"num_moe_experts": "num_experts", "gated_linear_unit": "swiglu"}
SETTINGS = ("parallel_size: ", "batch_size: ", "seq_length: ", "bf16: ", "fp8: ")
READ = KEPT | {"moe_router_force_load_balancing", "optimizer", "recompute_granularity", "sequence_parallel"}


def read_section(match: re.Match[str]) -> LineFields | None:
    """Read a key of a section such as `model`, unless it leaves its value to another section, as `comm_overlap` to `ddp`."""
    name = RENAMED.get(match[1], match[1])
    return argument(name, match[2]) if name in READ and not (name in OPTIONS and match[2] in NONE) else None


VALUE = r"'?(\[[^\]]*\]|[^\s']+)'?(?:  \(Mcore default: .*\))?\s*$"
"""In YAML, or since 0.4 as Python prints it, beside the default that it differs from."""
SETTING = matching(rf"(?:^|\s)(\w+): {VALUE}", lambda match: argument(match[1], match[2]))
# The nested keys of other models are indented further.
SECTION = matching(rf"{LAUNCHER_PREFIX}  (\w+): {VALUE}", read_section)
STEP_RULES = {"mem-max-allocated-gigabytes": MEMORY, **RULES}
MEGATRON_LM = Dialect(
    name="megatron-lm", signs=(("iteration", "elapsed time per iteration"), (" iteration ", "/", "| lm loss:")), rules=STEP_RULES
)
"""Reads the steps of Megatron-Bridge too: of two ranks, the one that prints Megatron-LM's line alone may speak first."""
BRIDGE = Dialect(
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


# Primus (AMD) over Megatron or torchtitan: the iteration line behind a colored prefix, in eight wordings. GB are GiB.
# Sources: primus/core/utils/logger.py (prefix), primus/backends/megatron/patches/training_log/print_rank_last_patches.py (core
# runtime), primus/modules/trainer/megatron/trainer.py (legacy).

WORLD = re.compile(r"\[rank-\d+/(\d+)\]")
DEVICE_MEMORY = "hip mem usage/free/total/usage_ratio: "
TYPES = ("(int)", "(float)", "(bool)", "(str)", "(list)", "(NoneType)")
"""Of the values of the resolved module configuration: '  name   : value (type)'."""


def read_primus_iteration(text: str) -> LineFields | None:
    """Read the iteration line, with the world size from its prefix and the memory in use on the last rank's device.

    `rocm mem usage` is ignored: Primus takes it after iterations 1 and 2 and then repeats it.
    """
    world = WORLD.search(text)
    return read_iteration(
        text,
        evidence={"world_size": count(world[1])} if world else {},
        device_used_bytes=in_bytes(text.partition(DEVICE_MEMORY)[2], GIBIBYTE),
    )


def _read_row(match: re.Match[str]) -> LineFields | None:
    if match[1] == "lora.enabled":
        return LineFields(arguments={"peft": "lora"}) if match[2] == "True" else None
    return argument(match[1], match[2])


ROW = matching(r"(?<![\w.-])(lora\.enabled|\w+)\s+: (\[[^\]]*\]|\S+) \((?:int|float|bool|str|list|NoneType)\)", _read_row)
PRIMUS = Dialect(
    name="primus",
    signs=(("elapsed time per iteration", "[rank-"), ("elapsed time per iteration", "hip mem usage")),
    rules={"elapsed time per iteration": read_primus_iteration}
    | dict.fromkeys(TYPES, ROW)
    | rules_of("primus")
    | {words: read for words, read in RULES.items() if words != "elapsed time per iteration"},
)


# NeMo 2: its progress line. Steps count from 0; values have four digits.


def read_progress(match: re.Match[str]) -> LineFields:
    """Read 'Training epoch 0, iteration 35/49 | lr: … | global_step: 35 | … | train_step_timing in s: 9.44 | …'."""
    parts = pairs(match.string[match.end() :])
    step = whole(parts.get("global step"))
    return LineFields(step=(count(match[1]) if step is None else step) + 1, total_steps=count(match[2]) + 1, **stated(parts))


NEMO = Dialect(
    name="nemo",
    signs=(("train_step_timing in s:", "iteration "),),
    rules={
        "Training epoch": matching(r"Training epoch \d+, iteration (\d+)/(\d+)", read_progress),
        "parallel group ranks: [[": matching(
            r"All (tensor|pipeline|context) (?:model )?parallel group ranks: \[\[([\d, ]+)\]",
            lambda match: LineFields(evidence={f"{match[1]}_parallel": match[2].count(",") + 1}),
        ),
        **rules_of("nemo"),
    },
)


# TPrimat: a line with the record of the run, then the iteration line of each step (train/rank.py).


def read_record(text: str) -> LineFields | None:
    """Read 'tprimat run: {...}', which begins a run; None where it is torn."""
    try:
        return LineFields(run=from_json(RunRecord, text.partition(RUN_LINE)[2], where=RUN_LINE))
    except RecordError:
        return None


TPRIMAT = Dialect(
    name="tprimat",
    signs=((RUN_LINE + "{",), ("[tprimat ", "elapsed time per iteration")),
    rules={
        RUN_LINE: read_record,
        # The time is of this step alone; Megatron-LM prints a mean since its last reset.
        "elapsed time per iteration": lambda text: read_iteration(text, mean_since_reset=False),
        **rules_of("tprimat"),
    },
)
