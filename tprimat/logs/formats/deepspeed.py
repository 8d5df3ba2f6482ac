"""DeepSpeed: its throughput timer, and the iteration lines of Megatron-DeepSpeed around it.

The timer prints '…/global_step=10, RunningAvgSamplesPerSec=…, CurrSamplesPerSec=…, MaxMemAllocated=…GB'. Only the current rate is
read: the running one is an average since the second step. GB in the log are GiB (deepspeed/utils/timer.py). The timer covers
forward and backward passes of some layouts in part only, so an iteration line's time counts where the log has both.
"""

import re

from tprimat.logs.arguments import argument
from tprimat.logs.fields import GIBIBYTE, Dialect, LineFields, count, in_bytes, matching, number, scaled, token_rates, whole
from tprimat.logs.formats import megatron

FIELD = re.compile(r"\b(\w+)=([^,\s]+)")
SWITCHES = {
    "bfloat16_enabled": {"matmul_dtype": "bf16"},
    "fp16_enabled": {"matmul_dtype": "fp16"},
    "fp16_master_weights_and_gradients": {"optimizer_states": "fp16 masters"},
}


def read_timer(match: re.Match[str]) -> LineFields:
    """Return one report of the timer."""
    fields = dict(FIELD.findall(match.string))
    return LineFields(
        step=count(match[1]),
        sequences_per_second=number(fields.get("CurrSamplesPerSec")),
        peak_allocated_bytes=in_bytes(fields.get("MaxMemAllocated"), GIBIBYTE),
    )


def read_iteration(match: re.Match[str]) -> LineFields:
    """Read 'iteration=  1/ 317892 | … elapsed_time_per_iteration_ms=108893.2 | … lm loss=11.13 |' of Megatron-DeepSpeed."""
    parts = (part.rpartition("=") for part in match.string[match.end() :].split("|"))
    fields = {name.strip(): value.strip() for name, sign, value in parts if sign}
    counted = (whole(fields.get(f"number_of_{kind}_iterations")) for kind in ("skipped", "nan"))
    return LineFields(
        step=count(match[1]),
        total_steps=count(match[2]),
        step_seconds=scaled(number(fields.get("elapsed_time_per_iteration_ms")), 1e-3),
        mean_since_reset=True,
        **token_rates(fields),
        loss=number(fields.get("lm loss")),
        grad_norm=number(fields.get("grad_norm")),
        learning_rate=number(fields.get("learning_rate")),
        global_batch_sequences=whole(fields.get("global_batch_size")),
        consumed_sequences=whole(fields.get("consumed_samples")),
        sequence_tokens=whole(fields.get("actual_seqlen")) or None,
        failed=any(counted),
    )


def read_argument(match: re.Match[str]) -> LineFields | None:
    """Return one row of DeepSpeed's configuration, or of the arguments of Megatron-DeepSpeed."""
    name, value = match.groups()
    if name in SWITCHES and value == "True":
        return LineFields(evidence=SWITCHES[name])
    if name == "optimizer_name" and value != "None":
        return LineFields(evidence={"optimizer": value})
    return argument(name, value)


DIALECT = Dialect(
    name="deepspeed",
    signs=(("global_step=", "CurrSamplesPerSec="), ("iteration=", "elapsed_time_per_iteration_ms=")),
    rules={
        "CurrSamplesPerSec": matching(r"global_step=(\d+)", read_timer),
        "elapsed_time_per_iteration_ms=": matching(r"iteration=\s*(\d+)/\s*(\d+)", read_iteration),
        "elapsed time per iteration": megatron.read_iteration,
        "skipped=": matching(
            r"\bstep=(\d+), skipped=\d+, lr=\[([^,\]]+)",
            lambda match: LineFields(step=count(match[1]), learning_rate=number(match[2])),
        ),
        " ..": matching(r"\b(\w+) \.{2,} (\S+)", read_argument),
    },
    marks_its_end=False,
)
