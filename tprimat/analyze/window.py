"""Find the steady steps of a run, by a rule that every result states in words."""

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np

from tprimat.core.errors import MetricError
from tprimat.core.statistics import Array, drift, median, outliers, unsteady_prefix
from tprimat.records.evidence import STEPS_WITHOUT_GRAPHS, captures_layers
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
    _check(steps)
    usual = without_graphs if warmup == "auto" else 0
    left = [step for step in steps if step.step not in profiled and step.step > usual]
    slowed = [step.step for step in steps if step.step in profiled]
    seconds = np.array([step.step_seconds for step in left])
    if not left:
        skipped, rule = 0, "every step was before the CUDA graphs, or profiled" if usual else "every step was profiled"
    else:
        skipped, rule = _auto(left, seconds) if warmup == "auto" else _fixed(left, warmup)
    if usual and left:
        early = f"{_ranges(range(1, usual + 1))}: before the CUDA graphs"
        rule = f"{rule}; {early}" if skipped else f"excluded {early}"
    if slowed and left:
        rule += f"; {_ranges(slowed)}: profiled"
    if skipped == len(left):
        warm = len(steps) - len(left) - len(slowed) + skipped
        raise MetricError(
            f"No steady step is left: {len(steps)} measured, {warm} of them warm-up, {len(slowed)} profiled.",
            why=rule,
            fix="run more steps, or leave out fewer (warm-up 0 keeps all" + ("; profiling off)" if slowed else ")"),
        )
    return _window(left[skipped].step, left[-1].step, seconds[skipped:], rule, slowed)


def _window(first: int, last: int, seconds: Array, rule: str, slowed: Sequence[int]) -> Window:
    slope, p_value = drift(seconds)
    return Window(
        first_step=first,
        last_step=last,
        steps=len(seconds),
        outliers=outliers(seconds),
        rule=rule,
        drift_per_step=slope / median(seconds) if p_value < 0.05 else None,
        left_out=tuple(step for step in slowed if first < step < last),
    )


def steady_steps(steps: Sequence[StepRecord], window: Window) -> tuple[StepRecord, ...]:
    """Return the steps inside a window."""
    left_out = frozenset(window.left_out)
    return tuple(step for step in steps if window.first_step <= step.step <= window.last_step and step.step not in left_out)


def _ranges(numbers: Sequence[int]) -> str:
    """Write rising numbers briefly: 'steps 2-8, 12'."""
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and number == stretches[-1][-1] + 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    words = [f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in stretches]
    return f"step{'s' if len(numbers) > 1 else ''} {', '.join(words)}"


def _check(steps: Sequence[StepRecord]) -> None:
    if not steps:
        raise MetricError(
            "No step was measured.", fix="see how the run ended; a run that fails before its first step has no speed"
        )
    for step in steps:
        if not (step.step_seconds > 0 and math.isfinite(step.step_seconds)):
            raise MetricError(
                f"Step {step.step} took {step.step_seconds} s.", why="A step time is a positive, finite number of seconds."
            )
    for former, later in pairwise(steps):
        if later.step <= former.step:
            raise MetricError(
                f"Step {later.step} follows step {former.step}.", why="Steps are recorded once each, in rising order."
            )


def _fixed(left: Sequence[StepRecord], warmup: int) -> tuple[int, str]:
    skipped = bisect_right(left, warmup, key=lambda step: step.step)
    return skipped, f"excluded steps up to {warmup}: as requested" if warmup > 0 else "excluded none: as requested"


def _auto(left: Sequence[StepRecord], seconds: Array) -> tuple[int, str]:
    startup = int(left[0].step == 1)
    count, faster = unsteady_prefix(seconds[startup:])
    if count == 0:
        if startup:
            return 1, "excluded step 1: start-up"
        return 0, f"excluded none: the record starts at step {left[0].step}, and no stretch of another speed follows"
    excluded = _ranges([step.step for step in left[: startup + count]])
    if faster:
        return startup + count, f"excluded {excluded}: faster than what follows, and not sustained"
    return startup + count, f"excluded {excluded}: warm-up"


def ran_from_graphs(run: RunRecord) -> bool:
    """Whether CUDA graphs ran the layers."""
    return captures_layers(run.engine_options)


def steps_without_graphs(run: RunRecord) -> int:
    """Return how many steps came before those that the embedded engine launched as CUDA graphs; 0 for runs without."""
    return STEPS_WITHOUT_GRAPHS if run.engine_options.get("cuda_graphs") is True else 0


def tensor_memory(run: RunRecord, steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Drop the allocated memory of steps that CUDA graphs ran: torch counts what the graphs hold only as reserved.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#graph-memory-management
    """
    return [replace(step, peak_allocated_bytes=None) for step in steps] if ran_from_graphs(run) else steps
