"""Megatron-LM: the iteration line, the argument dump and the memory report (megatron/training/training.py, arguments.py).

Primus, Megatron-Bridge and TPrimat print the same lines with additions: their files build on this one.
"""

import re
from typing import Any

from tprimat.logs.arguments import argument
from tprimat.logs.fields import (
    GIBIBYTE,
    MEBIBYTE,
    LineFields,
    count,
    in_bytes,
    matching,
    number,
    rules_of,
    scaled,
    token_rates,
    whole,
)

ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+)")
SIZE = re.compile(r"(?<![\w-])(world|data-parallel|context-parallel|tensor-model-parallel|pipeline-model-parallel) size: (\d+)")
SIZES = {
    "world": "world_size",
    "data-parallel": "data_parallel",
    "context-parallel": "context_parallel",
    "tensor-model-parallel": "tensor_parallel",
    "pipeline-model-parallel": "pipeline_parallel",
}
RANK_PARAMETERS = "parameters of rank"
"""How the evidence of such a line begins; its end names the rank."""
PREDICTED_TOKEN = re.compile(r"mtp_(\d+) loss: ")


def pairs(text: str) -> dict[str, str]:
    """Split ' a: 1 | b c: 2 |' into {'a': '1', 'b c': '2'}."""
    parts = (part.rpartition(": ") for part in text.split("|"))
    return {name.strip(): value.strip() for name, colon, value in parts if colon}


def read_iteration(text: str, **others: Any) -> LineFields | None:
    """Read the iteration line of Megatron-LM and its derivatives; `others` are fields that only a derivative's line has.

    `X/Y` is the value of this iteration and an average over several; the average is ignored. A time without `/Y` is itself a
    mean since the last line that reset the timer, and the first line of a process resets nothing: see second_line.py.
    """
    match = ITERATION.search(text)
    if match is None:
        return None
    fields = pairs(text[match.end() :])
    elapsed = fields.get("elapsed time per iteration (ms)")
    others.setdefault("mean_since_reset", elapsed is not None and "/" not in elapsed)
    others.setdefault("peak_reserved_bytes", in_bytes(fields.get("memory(GiB)"), GIBIBYTE))  # of ms-swift
    further = [count(digits) for digits in PREDICTED_TOKEN.findall(text)]
    counted = (whole(fields.get(f"number of {kind} iterations")) for kind in ("skipped", "nan"))
    return LineFields(
        step=count(match[1]),
        total_steps=count(match[2]),
        step_seconds=scaled(number(elapsed), 1e-3),
        **token_rates(fields),
        tflops_per_gpu=number(fields.get("throughput per GPU (TFLOP/s/GPU)") or fields.get("compute per GPU (TFLOP/s/GPU)")),
        loss=number(fields.get("lm loss") or fields.get("loss")),  # programs that fine-tune print the latter
        grad_norm=number(fields.get("grad norm")),
        learning_rate=number(fields.get("learning rate")),
        global_batch_sequences=whole(fields.get("global batch size")),
        consumed_sequences=whole(fields.get("consumed samples")),
        sequence_tokens=whole(fields.get("actual seqlen")) or None,
        failed=any(counted),
        arguments=({"mtp_num_layers": str(max(further))} if further else {})
        | ({"reward": "printed"} if "reward" in fields else {}),
        **others,
    )


def read_parameters(match: re.Match[str]) -> LineFields:
    """Return the parameters of one rank, which add up where all ranks print theirs."""
    return LineFields(evidence={f"{RANK_PARAMETERS} {match[1]}": count(match[2])})


def read_memory(match: re.Match[str]) -> LineFields:
    """Read '[Rank 0] (after 2 iterations) memory (MB) | allocated: … | max allocated: …': the allocator's peak so far.

    MB in the log are MiB (megatron/training/utils.py, report_memory).
    """
    fields = pairs(match.string[match.end() :])
    return LineFields(
        step=count(match[1]),
        peak_allocated_bytes=in_bytes(fields.get("max allocated"), MEBIBYTE),
        peak_reserved_bytes=in_bytes(fields.get("max reserved"), MEBIBYTE),
    )


RULES = {
    "elapsed time per iteration": read_iteration,
    "max allocated": matching(r"\(after (\d+) iterations\) memory \(MB\)", read_memory),
    " ..": matching(r"\b(\w+) \.{2,} (\[[^\]]*\](?=\s|$)|\S+)", lambda match: argument(match[1], match[2])),
    "using world size": lambda text: LineFields(evidence={SIZES[name]: count(digits) for name, digits in SIZE.findall(text)}),
    "number of parameters on": matching(  # '(tensor, gtp_remat, pipeline)' since core 0.19
        r"number of parameters on \(tensor,[\w ,]* pipeline\) model parallel rank \(([\d, ]+)\): (\d+)", read_parameters
    ),
    **rules_of("megatron"),
}
SIGNS = (("iteration", "elapsed time per iteration"),)
