"""DeepSpeed: its throughput timer, and the iteration lines of Megatron-DeepSpeed and GPT-NeoX around it.

The timer prints '…/global_step=10, RunningAvgSamplesPerSec=…, CurrSamplesPerSec=…, MaxMemAllocated=…GB'. Only the current rate is
read: the running one is an average since the second step. GB in the log are GiB (deepspeed/utils/timer.py). The timer covers
forward and backward passes of some layouts in part only, so an iteration line's time counts where the log has both.
"""

import re

from tprimat.logs.fields import GIBIBYTE, LineFields, count, in_bytes, number, plain, scaled, whole
from tprimat.logs.formats import megatron_lm

NAME = "deepspeed"
SIGNS = (("global_step=", "CurrSamplesPerSec="), ("iteration=", "elapsed_time_per_iteration_ms="))

STEP = re.compile(r"global_step=(\d+)")
ITERATION = re.compile(r"iteration=\s*(\d+)/\s*(\d+)")
FIELD = re.compile(r"\b(\w+)=([^,\s]+)")
ARGUMENT = re.compile(r"\b(\w+) \.{2,} (\S+)")
RATE = re.compile(r"\bstep=(\d+), skipped=(\d+), lr=\[([^,\]]+)")
ARGUMENTS = {
    "train_batch_size": "global_batch_sequences",
    "train_micro_batch_size_per_gpu": "micro_batch_sequences",
    "world_size": "world_size",
}
DTYPES = {"bfloat16_enabled": "bf16", "fp16_enabled": "fp16"}
OFFLOADED = re.compile(r"\b(offload_(?:optimizer|param))=\w+\(device=\W*(?:\w+\.)?(\w+)")
"""In the row of zero_config: offload_optimizer=DeepSpeedZeroOffloadOptimizerConfig(device='cpu', …."""
MARKS = ("CurrSamplesPerSec", "skipped=", " ..", "elapsed_time_per_iteration_ms=", "elapsed time per iteration")


def read_line(text: str) -> LineFields | None:
    """Return the fields of a line; None where it has none."""
    if "CurrSamplesPerSec" in text:
        return read_step(plain(text))
    if "elapsed_time_per_iteration_ms=" in text:
        return read_iteration(plain(text))
    if "elapsed time per iteration" in text:
        return megatron_lm.read_iteration(plain(text))
    if "skipped=" in text and (match := RATE.search(plain(text))):
        return LineFields(step=count(match[1]), learning_rate=number(match[3]))
    if "zero_config .." in text:
        return LineFields(arguments={name: device for name, device in OFFLOADED.findall(text) if device != "none"})
    if " .." in text and (match := ARGUMENT.search(plain(text))):
        return read_argument(match[1], match[2])
    return None


def read_step(text: str) -> LineFields | None:
    """Return one report of the timer."""
    match = STEP.search(text)
    if match is None:
        return None
    fields = dict(FIELD.findall(text))
    return LineFields(
        step=count(match[1]),
        sequences_per_second=number(fields.get("CurrSamplesPerSec")),
        peak_allocated_bytes=in_bytes(number(fields.get("MaxMemAllocated")), GIBIBYTE),
    )


def read_iteration(text: str) -> LineFields | None:
    """Read 'iteration=  1/ 317892 | … elapsed_time_per_iteration_ms=108893.2 | … lm loss=11.13 |' of Megatron-DeepSpeed."""
    match = ITERATION.search(text)
    if match is None:
        return None
    parts = (part.rpartition("=") for part in text[match.end() :].split("|"))
    fields = {name.strip(): value.strip() for name, sign, value in parts if sign}
    return LineFields(
        step=count(match[1]),
        total_steps=count(match[2]),
        step_seconds=scaled(number(fields.get("elapsed_time_per_iteration_ms")), 1e-3),
        mean_since_reset=True,
        tokens_per_second_per_gpu=number(fields.get("tokens_per_gpu_per_second_tgs")),
        loss=number(fields.get("lm loss")),
        grad_norm=number(fields.get("grad_norm")),
        learning_rate=number(fields.get("learning_rate")),
        global_batch_sequences=whole(fields.get("global_batch_size")),
        consumed_sequences=whole(fields.get("consumed_samples")),
        skipped_steps=whole(fields.get("number_of_skipped_iterations")),
        nan_steps=whole(fields.get("number_of_nan_iterations")),
        evidence={"sequence_tokens": length} if (length := whole(fields.get("actual_seqlen"))) else {},
    )


def read_argument(name: str, value: str) -> LineFields | None:
    """Return one row of DeepSpeed's configuration, or of the arguments of Megatron-DeepSpeed and GPT-NeoX."""
    if name in ARGUMENTS and (argument := whole(value)) is not None:
        return LineFields(evidence={ARGUMENTS[name]: argument})
    if name in DTYPES and value == "True":
        return LineFields(evidence={"matmul_dtype": DTYPES[name]})
    if name == "optimizer_name" and value != "None":
        return LineFields(evidence={"optimizer": value})
    if name == "fp16_master_weights_and_gradients" and value == "True":
        return LineFields(evidence={"optimizer_states": "fp16 masters"})
    return megatron_lm.argument(name, value)
