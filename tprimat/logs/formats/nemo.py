"""NeMo: the progress line of version 2, and the progress bar of version 1. Steps count from 0; values have four digits.

A bar is printed again with values of the step before. tqdm shortens numbers: '2e+3' may be any step around it and is not read.
"""

import re

from tprimat.logs.fields import LineFields, count, in_bytes, number, plain, whole
from tprimat.logs.formats.megatron_lm import pairs

NAME = "nemo"
SIGNS = (("train_step_timing in s:", "iteration "), ("train_step_timing in s=", "global_step="))

PROGRESS = re.compile(r"Training epoch \d+, iteration (\d+)/(\d+)")
BAR = re.compile(r"Epoch (\d+): [^\[]*?\b(?:(\d+)/(\d+|\?)|\d+it) \[([^\]]*train_step_timing in s=[^\]]*)\]")
MEMBERS = re.compile(r"GLOBAL_RANK: \d+, MEMBER: \d+/(\d+)")
GROUPS = re.compile(r"All (tensor|pipeline|context) (?:model )?parallel group ranks: \[\[([\d, ]+)\]")
MARKS = (
    "Training epoch",
    "train_step_timing in s=",
    "GLOBAL_RANK",
    "parallel group ranks: [[",
    "`Trainer.fit` stopped",
    "Adding lora to",
)


def read_line(text: str) -> LineFields | None:
    """Return the fields of a line; None where it has none."""
    if "Training epoch" in text:
        return read_progress(plain(text))
    if "train_step_timing in s=" in text:
        return read_bar(plain(text))
    if "GLOBAL_RANK" in text and (match := MEMBERS.search(text)):
        return LineFields(evidence={"world_size": count(match[1])})
    if "parallel group ranks: [[" in text and (match := GROUPS.search(text)):
        return LineFields(evidence={f"{match[1]}_parallel": match[2].count(",") + 1})
    if "Adding lora to" in text:
        return LineFields(arguments={"peft": "lora"})
    if "`Trainer.fit` stopped" in text:
        return LineFields(finished=True)
    return None


def read_progress(text: str) -> LineFields | None:
    """Read 'Training epoch 0, iteration 35/49 | lr: … | global_step: 35 | … | train_step_timing in s: 9.44 | …'."""
    match = PROGRESS.search(text)
    if match is None:
        return None
    fields = pairs(text[match.end() :])
    step = whole(fields.get("global_step"))
    return LineFields(
        step=(count(match[1]) if step is None else step) + 1,
        total_steps=count(match[2]) + 1,
        step_seconds=number(fields.get("train_step_timing in s")),
        tokens_per_second_per_gpu=number(fields.get("tokens_per_sec_per_gpu")),
        tflops_per_gpu=number(fields.get("TFLOPS_per_GPU")),
        loss=number(fields.get("reduced_train_loss")),
        grad_norm=number(fields.get("grad_norm")),
        learning_rate=number(fields.get("lr")),
        global_batch_sequences=whole(fields.get("global_batch_size")),
        consumed_sequences=whole(fields.get("consumed_samples")),
        peak_allocated_bytes=in_bytes(number(fields.get("peak_memory_usage")), 1),
    )


def read_bar(text: str) -> LineFields | None:
    """Read 'Epoch 0: :  47%|…| 7/15 [06:19<07:13, …, global_step=5.000, …, train_step_timing in s=49.50]'."""
    match = BAR.search(text)
    if match is None:
        return None
    pairs_of_bar = (part.partition("=") for part in match[4].split(", "))
    fields = {name.strip(): value for name, _, value in pairs_of_bar}
    step, seconds = exact(fields.get("global_step")), number(fields.get("train_step_timing in s"))
    if step is None or seconds is None:
        return None
    return LineFields(
        step=step + 1,
        total_steps=whole(match[3]) if match[1] == "0" else None,  # of an epoch
        step_seconds=seconds,
        loss=number(fields.get("reduced_train_loss")),
        learning_rate=number(fields.get("lr")),
        consumed_sequences=exact(fields.get("consumed_samples")),
    )


def exact(text: str | None) -> int | None:
    """Return a whole number that tqdm has not shortened."""
    return None if text is None or "e" in text else whole(text)
