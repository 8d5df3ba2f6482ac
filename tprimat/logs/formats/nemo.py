"""NeMo: the progress line of version 2, and the progress bar of version 1. Steps count from 0; values have four digits.

A bar is printed again with values of the step before. tqdm shortens numbers: '2e+3' may be any step around it and is not read.
"""

import re

from tprimat.logs.fields import Dialect, LineFields, count, in_bytes, matching, number, says, states, whole
from tprimat.logs.formats.megatron_lm import pairs


def read_progress(match: re.Match[str]) -> LineFields:
    """Read 'Training epoch 0, iteration 35/49 | lr: … | global_step: 35 | … | train_step_timing in s: 9.44 | …'."""
    fields = pairs(match.string[match.end() :])
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
        peak_allocated_bytes=in_bytes(fields.get("peak_memory_usage"), 1),
    )


def read_bar(match: re.Match[str]) -> LineFields | None:
    """Read 'Epoch 0: :  47%|…| 7/15 [06:19<07:13, …, global_step=5.000, …, train_step_timing in s=49.50]'."""
    parts = (part.partition("=") for part in match[4].split(", "))
    fields = {name.strip(): value for name, _, value in parts}
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


DIALECT = Dialect(
    name="nemo",
    signs=(("train_step_timing in s:", "iteration "), ("train_step_timing in s=", "global_step=")),
    rules={
        "Training epoch": matching(r"Training epoch \d+, iteration (\d+)/(\d+)", read_progress),
        "train_step_timing in s=": matching(
            r"Epoch (\d+): [^\[]*?\b(?:(\d+)/(\d+|\?)|\d+it) \[([^\]]*train_step_timing in s=[^\]]*)\]", read_bar
        ),
        "GLOBAL_RANK": states("world_size", r"GLOBAL_RANK: \d+, MEMBER: \d+/(\d+)"),
        "parallel group ranks: [[": matching(
            r"All (tensor|pipeline|context) (?:model )?parallel group ranks: \[\[([\d, ]+)\]",
            lambda match: LineFields(evidence={f"{match[1]}_parallel": match[2].count(",") + 1}),
        ),
        "Adding lora to": says(arguments={"peft": "lora"}),
        "`Trainer.fit` stopped": says(finished=True),
    },
)
