"""Which steps of a run are steady, by a rule that is stated in words with every result."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from tprimat.analyze.statistics import drift, outliers, slow_prefix
from tprimat.errors import MetricError
from tprimat.record.derived import Window
from tprimat.record.schema import StepRecord

Warmup = int | Literal["auto"]


def steady_window(steps: Sequence[StepRecord], warmup: Warmup = "auto", profiled: Collection[int] = ()) -> Window:
    """The steady steps of a run: everything after warm-up that the profiler left alone.

    Step 1 always holds start-up (allocation, compilation, first collectives), so `auto` leaves it out in any case, and with it
    whatever slow stretch follows (`statistics.slow_prefix`). A number leaves out the steps up to that number. Profiled steps are
    left out before either rule looks at the others.

    Raises:
        MetricError: a step time is not a positive number, step numbers do not rise, or no step is left.
    """
    _check(steps)
    plain = [step for step in steps if step.step not in profiled]
    slowed = [step.step for step in steps if step.step in profiled]
    skipped, rule = (0, "every step was profiled") if not plain else _auto(plain) if warmup == "auto" else _fixed(plain, warmup)
    kept = plain[skipped:]
    if slowed and plain:
        rule += f"; profiled: {_ranges(slowed)} left out, slowed down by the profiler"
    if not kept:
        raise MetricError(
            f"No steady step is left: {len(steps)} measured, {skipped} of them warm-up, {len(slowed)} profiled.",
            why=rule,
            fix="run more steps, or leave out fewer (warm-up 0 keeps all" + ("; profiling off)" if slowed else ")"),
        )
    seconds = np.array([step.step_seconds for step in kept])
    trend = drift(seconds)
    significant = trend is not None and trend.p_value < 0.05
    return Window(
        first_step=kept[0].step,
        last_step=kept[-1].step,
        steps=len(kept),
        outliers=int(outliers(seconds).sum()),
        rule=rule,
        drift_per_step=trend.slope / float(np.median(seconds)) if trend is not None and significant else None,
        left_out=tuple(step for step in slowed if kept[0].step < step < kept[-1].step),
    )


def steps_inside(steps: Sequence[StepRecord], window: Window) -> tuple[StepRecord, ...]:
    """The steps that a window keeps."""
    return tuple(
        step for step in steps if window.first_step <= step.step <= window.last_step and step.step not in window.left_out
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers in few words: 'steps 2 to 8, 12'."""
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and number == stretches[-1][-1] + 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    words = [f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in stretches]
    return f"step{'s' if len(numbers) > 1 else ''} {', '.join(words)}"


def _check(steps: Sequence[StepRecord]) -> None:
    if not steps:
        raise MetricError(
            "No step was measured.", fix="see how the run ended; a run that fails before its first step has no speed"
        )
    if not all(0 < step.step_seconds < float("inf") for step in steps):
        bad = next(step for step in steps if not 0 < step.step_seconds < float("inf"))
        raise MetricError(
            f"Step {bad.step} took {bad.step_seconds} s.", why="A step time is a positive, finite number of seconds."
        )
    for before, after in pairwise(steps):
        if after.step <= before.step:
            raise MetricError(
                f"Step {after.step} follows step {before.step}.", why="Steps are recorded once each, in rising order."
            )


def _fixed(steps: Sequence[StepRecord], warmup: int) -> tuple[int, str]:
    skipped = sum(step.step <= warmup for step in steps)
    return skipped, f"steps up to {warmup} left out, as asked" if warmup > 0 else "all steps kept, as asked"


def _auto(steps: Sequence[StepRecord]) -> tuple[int, str]:
    startup = int(steps[0].step == 1)
    slow = slow_prefix(np.array([step.step_seconds for step in steps[startup:]]))
    if slow == 0:
        if startup:
            return 1, "step 1 left out (start-up); no slow first stretch after it"
        return 0, f"starts at the first recorded step, {steps[0].step}; no slow first stretch"
    last = steps[startup + slow - 1].step
    before = "step 1 (start-up) and the slow stretch" if startup else "the slow stretch"
    return startup + slow, f"{before} up to step {last} left out: slower than the later half by more than its noise"
