"""DeepSpeed's throughput timer: '…/global_step=10, RunningAvgSamplesPerSec=…, CurrSamplesPerSec=…, MaxMemAllocated=…GB'.

Only the current rate is read: the running one is an average since the second step. GB in the log are GiB
(deepspeed/utils/timer.py).
"""

import re

from tprimat.logs.fields import GIBIBYTE, LineFields, count, in_bytes, number, plain, whole

NAME = "deepspeed"
SIGNS = (("global_step=", "CurrSamplesPerSec="),)

STEP = re.compile(r"global_step=(\d+)")
FIELD = re.compile(r"(\w+)=([^,\s]+)")
ARGUMENT = re.compile(r"(\w+) \.{2,} (\S+)")
RATE = re.compile(r"\bstep=(\d+), skipped=(\d+), lr=\[([^,\]]+)")
ARGUMENTS = {
    "train_batch_size": "global_batch_sequences",
    "train_micro_batch_size_per_gpu": "micro_batch_sequences",
    "world_size": "world_size",
}
DTYPES = {"bfloat16_enabled": "bf16", "fp16_enabled": "fp16"}
MARKS = ("CurrSamplesPerSec", "skipped=", " ..")


def read_line(text: str) -> LineFields | None:
    """Return the fields of a line; None where it has none."""
    if "CurrSamplesPerSec" in text:
        return read_step(plain(text))
    if "skipped=" in text and (match := RATE.search(plain(text))):
        return LineFields(step=count(match[1]), learning_rate=number(match[3]))
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


def read_argument(name: str, value: str) -> LineFields | None:
    """Return one row of the configuration."""
    if name in ARGUMENTS and (argument := whole(value)) is not None:
        return LineFields(evidence={ARGUMENTS[name]: argument})
    if name in DTYPES and value == "True":
        return LineFields(evidence={"matmul_dtype": DTYPES[name]})
    return None
