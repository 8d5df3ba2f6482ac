"""NeMo 2: the progress line of its Lightning trainer. Steps count from 0; values have four significant digits."""

import re

from tprimat.logs.fields import LineFields, count, in_bytes, number, plain, whole
from tprimat.logs.formats.megatron_lm import pairs

NAME = "nemo"
SIGNS = (("train_step_timing in s:", "iteration "),)

PROGRESS = re.compile(r"Training epoch \d+, iteration (\d+)/(\d+)")
MEMBERS = re.compile(r"GLOBAL_RANK: \d+, MEMBER: \d+/(\d+)")
GROUPS = re.compile(r"All (tensor|pipeline|context) (?:model )?parallel group ranks: \[\[([\d, ]+)\]")
MARKS = ("Training epoch", "GLOBAL_RANK", "parallel group ranks: [[", "`Trainer.fit` stopped", "Adding lora to")


def read_line(text: str) -> LineFields | None:
    """Return the fields of a line; None where it has none."""
    if "Training epoch" in text:
        return read_progress(plain(text))
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
