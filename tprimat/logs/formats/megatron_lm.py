"""Megatron-LM's log: the iteration line, the argument dump and the memory report (megatron/training/training.py, arguments.py).

Primus and Megatron-Bridge print the same lines with additions: primus.py and megatron_bridge.py build on this file.
"""

import re
from typing import Any

from tprimat.logs.fields import (
    GIBIBYTE,
    HUMAN_SUFFIXES,
    KEPT_ARGUMENTS,
    KNOWN_LATER,
    MEBIBYTE,
    LineFields,
    count,
    in_bytes,
    megatron_argument,
    number,
    plain,
    scaled,
    whole,
)

NAME = "megatron-lm"
SIGNS = (("iteration", "elapsed time per iteration"),)

ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+)")
ARGUMENT = re.compile(r"\b(\w+) \.{2,} (\[[^\]]*\](?=\s|$)|\S+)")
SIZE = re.compile(r"(?<![\w-])(world|data-parallel|context-parallel|tensor-model-parallel|pipeline-model-parallel) size: (\d+)")
SIZES = {
    "world": "world_size",
    "data-parallel": "data_parallel",
    "context-parallel": "context_parallel",
    "tensor-model-parallel": "tensor_parallel",
    "pipeline-model-parallel": "pipeline_parallel",
}
PARAMETERS = re.compile(r"number of parameters on \(tensor,[\w ,]* pipeline\) model parallel rank \([\d, ]+\): (\d+)")
"""'(tensor, gtp_remat, pipeline)' since core 0.19."""
HUMAN_FLOPS = re.compile(r"(\d+\.?\d*)([KMGTP]?)FLOPS")
MEMORY = re.compile(r"\(?after (\d+) iterations\)? memory \(MB\)")
"""Without brackets in 2020."""
BARE_VALUE = re.compile(r"(\D+) (\S+)")
"""'lm loss 9.1E+00' of 2019, without a colon."""
PREDICTED_TOKEN = re.compile(r"mtp_(\d+) loss: ")
BILLIONS = re.compile(r"Total number of parameters in billions: (\d+\.?\d*)")
VOCABULARY = re.compile(r"padded vocab \(size: \d+\)[^()]*\(new size: (\d+)\)")
TOKEN_RATES = ("tokens per GPU (tokens/s/GPU)", "tokens/s/GPU inst/harmonic mean", "tokens per gpu per second (tgs)")
"""Of Primus in two versions, and Megatron-DeepSpeed."""
LOSSES = ("lm loss", "lm_loss", "lm-loss", "loss")
"""Of Megatron-LM, GPT-NeoX, Megatron-DeepSpeed in 2021, and programs that fine-tune."""
MARKS = (
    "iteration",
    " ..",
    "using world size",
    "number of parameters on",
    "Total number of parameters in billions",
    "after training is done",
    " arguments --",
    " of arguments --",
    "padded vocab",
)


def read_line(text: str) -> LineFields | None:
    """Return the fields of a line; None where it has none."""
    if "elapsed time per iteration" in text:
        return read_iteration(plain(text))
    if "max allocated" in text:
        return read_memory(plain(text))
    if " arguments --" in text:
        return LineFields(dump="ends" if "end of arguments" in text else "begins")
    if " .." in text:
        return read_argument(plain(text))
    if "padded vocab" in text and (match := VOCABULARY.search(text)):
        return LineFields(arguments={"padded_vocab_size": match[1]})
    if "using world size" in text:
        return LineFields(evidence={SIZES[name]: count(digits) for name, digits in SIZE.findall(plain(text))})
    if "Total number of parameters in billions" in text and (match := BILLIONS.search(text)):
        return LineFields(arguments={"parameters_in_billions": match[1]})
    if "number of parameters on" in text and (match := PARAMETERS.search(text)):
        return LineFields(evidence={"rank_parameters": count(match[1])})
    if "after training is done" in text or "exiting program at iteration" in text:
        return LineFields(finished=True)
    return None


def read_iteration(text: str, **others: Any) -> LineFields | None:
    """Read the iteration line of Megatron-LM and its derivatives; `others` are fields that only a derivative's line has.

    `X/Y` is the value of this iteration and an average over several; the average is ignored. A time without `/Y` is itself a
    mean since the last line that reset the timer, and the first line of a process resets nothing: see steps.correct_second.
    """
    match = ITERATION.search(text)
    if match is None:
        return None
    fields = pairs(text[match.end() :])
    elapsed = fields.get("elapsed time per iteration (ms)")
    tokens = next((fields[name] for name in TOKEN_RATES if name in fields), None)
    if length := whole(fields.get("actual seqlen")):
        others["evidence"] = {**others.get("evidence", {}), "sequence_tokens": length}
    others.setdefault("peak_reserved_bytes", in_bytes(number(fields.get("memory(GiB)")), GIBIBYTE))  # of ms-swift
    further = [count(digits) for digits in PREDICTED_TOKEN.findall(text)]
    flop = fields.get("throughput per GPU (TFLOP/s/GPU)") or fields.get("compute per GPU (TFLOP/s/GPU)")
    in_seconds = fields.get("elapsed time per iteration (s)")
    others.setdefault("mean_since_reset", "/" not in (elapsed or in_seconds or "/"))
    return LineFields(
        step=count(match[1]),
        total_steps=count(match[2]),
        step_seconds=scaled(number(elapsed), 1e-3) if elapsed else number(in_seconds),
        tokens_per_second_per_gpu=number(tokens),
        tflops_per_gpu=number(flop) if flop else teraflops(fields.get("approx flops per GPU")),
        loss=number(next((fields[name] for name in LOSSES if name in fields), None)),
        grad_norm=number(fields.get("grad norm")),
        learning_rate=number(fields.get("learning rate")),
        global_batch_sequences=whole(fields.get("global batch size")),
        consumed_sequences=whole(fields.get("consumed samples")),
        consumed_tokens=whole(fields.get("consumed tokens")),
        skipped_steps=whole(fields.get("number of skipped iterations")),
        nan_steps=whole(fields.get("number of nan iterations")),
        arguments=({"mtp_num_layers": str(max(further))} if further else {})
        | ({"reward": "printed"} if "reward" in fields else {}),
        **others,
    )


def pairs(text: str) -> dict[str, str]:
    """Split ' a: 1 | b c: 2 |' into {'a': '1', 'b c': '2'}."""
    found = {}
    for part in text.split("|"):
        name, colon, value = part.rpartition(": ")
        if colon:
            found[name.strip()] = value.strip()
        elif bare := BARE_VALUE.fullmatch(part.strip()):
            found[bare[1]] = bare[2]
    return found


def teraflops(text: str | None) -> float | None:
    """Return 37.9 for '37.9TFLOPS' and 0.5 for '500.0GFLOPS', as GPT-NeoX prints them."""
    match = HUMAN_FLOPS.fullmatch(text or "")
    return None if match is None else float(match[1]) * HUMAN_SUFFIXES.get(match[2], 1.0) / 1e12


def read_argument(text: str) -> LineFields | None:
    """Read one row of the argument dump: '  name ........ value'."""
    match = ARGUMENT.search(text)
    return argument(match[1], match[2]) if match else None


def argument(name: str, value: str) -> LineFields | None:
    """Return one Megatron argument, however it was printed; None for arguments that records do not keep."""
    if name == "train_iters":
        return LineFields(total_steps=whole(value))
    evidence = megatron_argument(name, value)
    if name in KEPT_ARGUMENTS:
        return None if name in KNOWN_LATER and whole(value) is None else LineFields(arguments={name: value}, evidence=evidence)
    return LineFields(evidence=evidence) if evidence else None


def read_memory(text: str) -> LineFields | None:
    """Read '[Rank 0] (after 2 iterations) memory (MB) | allocated: … | max allocated: …': the allocator's peak so far.

    MB in the log are MiB (megatron/training/utils.py, report_memory).
    """
    match = MEMORY.search(text)
    if match is None:
        return None
    fields = pairs(text[match.end() :])
    return LineFields(
        step=count(match[1]),
        peak_allocated_bytes=in_bytes(number(fields.get("max allocated")), MEBIBYTE),
        peak_reserved_bytes=in_bytes(number(fields.get("max reserved")), MEBIBYTE),
    )
