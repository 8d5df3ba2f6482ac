"""Print each step of a run as Megatron-LM prints it, after one line with the record of the run.

Megatron-LM's wording (training_log in megatron/training/training.py) is what `tail -f`, grep and other tools know.
tprimat/logs/formats/tprimat.py reads both kinds of lines back.
"""

import sys
from datetime import datetime

from tprimat.core.flops import flop_per_token
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import RunRecord, StepRecord
from tprimat.records.store import RUN_LINE, to_json


class StepLog:
    """Write the lines of one run to stdout. Rank 0 alone calls it."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan

    def start(self, run: RunRecord) -> None:
        """Print the record, so that the log alone says what ran."""
        _print(RUN_LINE + to_json(run))

    def step(self, step: StepRecord) -> None:
        """Print one step."""
        _print(iteration_line(self._plan, step, datetime.now()))

    def end(self) -> None:
        """Print that training is done."""
        _print(f"[after training is done] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}")


def iteration_line(plan: RunPlan, step: StepRecord, now: datetime) -> str:
    """Format one step.

    Milliseconds have four decimals and memory is in bytes, so that what is read back equals the record. Throughput is in TFLOP/s
    with half the attention square (`causal`). A value that the step does not have is left out.
    """
    batch = plan.workload.global_batch_sequences
    values = (
        ("consumed samples", f"{step.step * batch:12d}"),
        ("elapsed time per iteration (ms)", f"{step.step_seconds * 1e3:.4f}"),
        ("throughput per GPU (TFLOP/s/GPU)", _throughput(plan, step)),
        ("learning rate", _absent_or(step.learning_rate, ".6E")),
        ("global batch size", f"{batch:5d}"),
        ("lm loss", _absent_or(step.loss, ".6E")),
        ("grad norm", _absent_or(step.grad_norm, ".7g")),
        ("number of skipped iterations", f"{0:3d}"),
        ("number of nan iterations", f"{not step.finite:3d}"),
        ("mem-max-allocated-bytes", _absent_or(step.peak_allocated_bytes, "d")),
        ("mem-max-reserved-bytes", _absent_or(step.peak_reserved_bytes, "d")),
    )
    shown = "".join(f" {name}: {value} |" for name, value in values if value is not None)
    return f" [tprimat {now:%Y-%m-%d %H:%M:%S.%f}] iteration {step.step:8d}/{plan.steps:8d} |{shown}"


def _throughput(plan: RunPlan, step: StepRecord) -> str | None:
    if not step.tokens or step.step_seconds <= 0:
        return None
    flop = step.tokens * flop_per_token(plan.workload.shape, plan.workload.sequence_tokens, dropped=step.dropped or 0.0)
    return f"{flop / step.step_seconds / plan.workload.layout.world_size / 1e12:.5g}"


def _absent_or(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
