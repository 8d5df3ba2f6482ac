"""NeMo 2: its progress line. Steps count from 0; values have four digits."""

import re

from tprimat.logs.fields import Dialect, LineFields, count, in_bytes, matching, number, rules_of, token_rates, whole
from tprimat.logs.formats.megatron_lm import pairs


def read_progress(match: re.Match[str]) -> LineFields:
    """Read 'Training epoch 0, iteration 35/49 | lr: … | global_step: 35 | … | train_step_timing in s: 9.44 | …'."""
    fields = pairs(match.string[match.end() :])
    step = whole(fields.get("global_step"))
    return LineFields(
        step=(count(match[1]) if step is None else step) + 1,
        total_steps=count(match[2]) + 1,
        step_seconds=number(fields.get("train_step_timing in s")),
        **token_rates(fields),
        tflops_per_gpu=number(fields.get("TFLOPS_per_GPU")),
        loss=number(fields.get("reduced_train_loss")),
        grad_norm=number(fields.get("grad_norm")),
        learning_rate=number(fields.get("lr")),
        global_batch_sequences=whole(fields.get("global_batch_size")),
        consumed_sequences=whole(fields.get("consumed_samples")),
        peak_allocated_bytes=in_bytes(fields.get("peak_memory_usage") or fields.get("max_memory_allocated"), 1),
        peak_reserved_bytes=in_bytes(fields.get("max_memory_reserved"), 1),
    )


DIALECT = Dialect(
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
