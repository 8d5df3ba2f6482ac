"""Megatron-LM's log: the iteration line, the argument dump and the memory report (megatron/training/training.py, arguments.py).

Other frameworks print the same lines with additions; primus.py and megatron_bridge.py build on this file.
"""

import re

from tprimat.logs.fields import LineFields
from tprimat.logs.values import MEBIBYTE, in_bytes, megatron_argument, number, plain, scaled, whole
from tprimat.units import TERA

NAME = "megatron-lm"
SIGNS = (("iteration", "elapsed time per iteration"),)

ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+)")
ARGUMENT = re.compile(r"(\w+) \.{2,} (\S+)")
SIZE = re.compile(r"(?<![\w-])(world|data-parallel|context-parallel|tensor-model-parallel|pipeline-model-parallel) size: (\d+)")
SIZES = {
    "world": "world_size",
    "data-parallel": "data_parallel",
    "context-parallel": "context_parallel",
    "tensor-model-parallel": "tensor_parallel",
    "pipeline-model-parallel": "pipeline_parallel",
}
PARAMETERS = re.compile(r"number of parameters on \(tensor, pipeline\) model parallel rank \(\d+, \d+\): (\d+)")
MEMORY = re.compile(r"\(after (\d+) iterations\) memory \(MB\)")


def read_line(text: str) -> LineFields | None:
    """What the line says; None when nothing."""
    if "elapsed time per iteration" in text:
        return read_iteration(plain(text))
    if " .." in text:
        return read_argument(plain(text))
    if "using world size" in text:
        return LineFields(evidence={SIZES[name]: int(count) for name, count in SIZE.findall(plain(text))})
    if "max allocated" in text:
        return read_memory(plain(text))
    if "number of parameters on" in text and (match := PARAMETERS.search(text)):
        return LineFields(evidence={"parameters": int(match[1])})
    if "after training is done" in text or "exiting program at iteration" in text:
        return LineFields(finished=True)
    return None


def read_iteration(text: str) -> LineFields | None:
    """The iteration line of Megatron-LM and of everything that imitates it.

    `X/Y` is the value of this iteration and an average over several; the average is left alone. A time without `/Y` is itself
    a mean since the last line that reset the timer, and the first line of a process resets nothing: see assemble.py.
    """
    match = ITERATION.search(text)
    if match is None:
        return None
    fields = pairs(text[match.end() :])
    elapsed = fields.get("elapsed time per iteration (ms)")
    rate = fields.get("throughput per GPU (TFLOP/s/GPU)") or fields.get("compute per GPU (TFLOP/s/GPU)")
    tokens = fields.get("tokens per GPU (tokens/s/GPU)") or fields.get("tokens/s/GPU inst/harmonic mean")
    return LineFields(
        step=int(match[1]),
        total_steps=int(match[2]),
        step_seconds=scaled(number(elapsed), 1e-3),
        mean_since_reset=elapsed is not None and "/" not in elapsed,
        tokens_per_second_per_gpu=number(tokens),
        model_flops_per_second_per_gpu=scaled(number(rate), TERA),
        loss=number(fields.get("lm loss") or fields.get("loss")),
        grad_norm=number(fields.get("grad norm")),
        learning_rate=number(fields.get("learning rate")),
        global_batch_sequences=whole(fields.get("global batch size")),
        consumed_sequences=whole(fields.get("consumed samples")),
        skipped_steps=whole(fields.get("number of skipped iterations")),
        nan_steps=whole(fields.get("number of nan iterations")),
        power_watts=number(fields.get("power per GPU (W/GPU)")),
    )


def pairs(text: str) -> dict[str, str]:
    """' a: 1 | b c: 2 |' -> {'a': '1', 'b c': '2'}."""
    found = {}
    for part in text.split("|"):
        name, colon, value = part.rpartition(": ")
        if colon:
            found[name.strip()] = value.strip()
    return found


def read_argument(text: str) -> LineFields | None:
    """One row of the argument dump: '  name ........ value'."""
    match = ARGUMENT.search(text)
    return argument(match[1], match[2]) if match else None


def argument(name: str, value: str) -> LineFields | None:
    """One Megatron argument, however it was printed; None when it says nothing that a record keeps."""
    if name == "train_iters":
        return LineFields(total_steps=whole(value))
    evidence = megatron_argument(name, value)
    return LineFields(evidence=evidence) if evidence else None


def read_memory(text: str) -> LineFields | None:
    """'[Rank 0] (after 2 iterations) memory (MB) | allocated: … | max allocated: …': the allocator's peak so far, in MiB.

    Megatron divides by 1024 twice and writes MB (megatron/training/utils.py, report_memory).
    """
    match = MEMORY.search(text)
    if match is None:
        return None
    fields = pairs(text[match.end() :])
    return LineFields(
        step=int(match[1]),
        peak_allocated_bytes=in_bytes(number(fields.get("max allocated")), MEBIBYTE),
        peak_reserved_bytes=in_bytes(number(fields.get("max reserved")), MEBIBYTE),
    )
