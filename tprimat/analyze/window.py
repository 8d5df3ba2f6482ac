"""Find the steady steps of a run, by a rule that every result states."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from tprimat.core.errors import MetricError
from tprimat.core.statistics import Array, drift, median, outliers, unsteady_prefix
from tprimat.records.evidence import captures_layers
from tprimat.records.schema import RunRecord, StepRecord, Window

Warmup = int | Literal["auto"]


def steady_window(
    steps: Sequence[StepRecord], warmup: Warmup = "auto", profiled: Collection[int] = (), without_graphs: int = 0
) -> Window:
    """Return the steady steps of a run: everything after warm-up, without profiled steps.

    Step 1 always contains start-up (allocation, compilation, first collectives), so `auto` excludes it in any case, with the
    stretch of another speed that follows it, if any (`statistics.unsteady_prefix`). A number excludes the steps up to it.
    Profiled steps are excluded before either rule looks at the others, and so are the first `without_graphs` steps of a run that
    CUDA graphs launch from then on, unless a number says otherwise.
    """
    if not steps:
        raise MetricError(
            "No step was measured.", fix="see how the run ended; a run that fails before its first step has no speed"
        )
    usual = without_graphs if warmup == "auto" else 0
    left = [step for step in steps if step.step not in profiled and step.step > usual]
    slowed = [step.step for step in steps if step.step in profiled]
    numbers, seconds = [step.step for step in left], np.array([step.step_seconds for step in left])
    skipped, reason = _warm_up(numbers, seconds) if warmup == "auto" else (bisect_right(numbers, warmup), "as requested")
    if skipped == len(left):
        warm = len(steps) - len(left) - len(slowed) + skipped
        raise MetricError(
            f"No steady step is left: {len(steps)} measured, {warm} of them warm-up, {len(slowed)} profiled.",
            fix="run more steps, or leave out fewer (warm-up 0 keeps all" + ("; profiling off)" if slowed else ")"),
        )
    excluded = {reason: numbers[:skipped], "before the CUDA graphs": range(1, usual + 1), "profiled": slowed}
    first, last = numbers[skipped], numbers[-1]
    slope, p_value = drift(seconds[skipped:])
    return Window(
        first_step=first,
        last_step=last,
        steps=len(left) - skipped,
        outliers=outliers(seconds[skipped:]),
        rule={reason: _ranges(numbers) for reason, numbers in excluded.items() if numbers},
        drift_per_step=slope / median(seconds[skipped:]) if p_value < 0.05 else None,
        left_out=tuple(step for step in slowed if first < step < last),
    )


def steady_steps(steps: Sequence[StepRecord], window: Window) -> tuple[StepRecord, ...]:
    """Return the steps inside a window."""
    left_out = frozenset(window.left_out)
    return tuple(step for step in steps if window.first_step <= step.step <= window.last_step and step.step not in left_out)


def _ranges(numbers: Sequence[int]) -> str:
    """Write rising numbers briefly: '2-8, 12'."""
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and number == stretches[-1][-1] + 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in stretches)


def _warm_up(numbers: Sequence[int], seconds: Array) -> tuple[int, str]:
    """Return how many of the first steps are not like those that follow, and why."""
    startup = int(numbers[:1] == [1])
    count, faster = unsteady_prefix(seconds[startup:])
    return startup + count, ("faster, not sustained" if faster else "warm-up") if count else "start-up"


def tensor_memory(run: RunRecord, steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Drop the allocated memory of steps that CUDA graphs ran: torch counts what the graphs hold only as reserved.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#graph-memory-management
    """
    return [replace(step, peak_allocated_bytes=None) for step in steps] if captures_layers(run.engine_options) else steps
