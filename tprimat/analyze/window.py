"""Which steps of a run are steady, by a rule that is stated in words with every result."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tprimat.errors import MetricError
from tprimat.records.metrics import Window
from tprimat.records.schema import StepRecord
from tprimat.records.steps import ABSENT, blocks_of, column, record_of
from tprimat.records.table import Rows
from tprimat.statistics import Array, drift, outliers, slow_prefix

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
    seconds, places, slowed = column(steps, "step_seconds"), None, []
    if profiled and (marks := np.isin(column(steps, "step"), sorted(profiled))).any():
        places, slowed = np.flatnonzero(~marks), [steps[int(place)].step for place in np.flatnonzero(marks)]
        seconds = seconds[places]
    left = _Left(steps, places, seconds)
    if len(seconds) == 0:
        skipped, rule = 0, "every step was profiled"
    else:
        skipped, rule = _auto(left) if warmup == "auto" else _fixed(left, warmup)
    if slowed and len(seconds):
        rule += f"; profiled: {_ranges(slowed)} left out, slowed down by the profiler"
    if skipped == len(seconds):
        raise MetricError(
            f"No steady step is left: {len(steps)} measured, {skipped} of them warm-up, {len(slowed)} profiled.",
            why=rule,
            fix="run more steps, or leave out fewer (warm-up 0 keeps all" + ("; profiling off)" if slowed else ")"),
        )
    return _window(left.number(skipped), left.number(len(seconds) - 1), seconds[skipped:], rule, slowed)


@dataclass(frozen=True, slots=True)
class _Left:
    """The steps that the profiler left alone."""

    steps: Sequence[StepRecord]
    places: NDArray[np.intp] | None
    """In steps; None: all of them."""
    seconds: Array

    def number(self, index: int) -> int:
        """Of one of them."""
        return self.steps[index if self.places is None else int(self.places[index])].step


def _window(first: int, last: int, seconds: Array, rule: str, slowed: Sequence[int]) -> Window:
    trend = drift(seconds)
    significant = trend is not None and trend.p_value < 0.05
    return Window(
        first_step=first,
        last_step=last,
        steps=len(seconds),
        outliers=outliers(seconds),
        rule=rule,
        drift_per_step=trend.slope / float(np.median(seconds)) if trend is not None and significant else None,
        left_out=tuple(step for step in slowed if first < step < last),
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
    before = None
    for rows in blocks_of(steps):
        seconds, numbers = rows["step_seconds"], rows["step"]
        if (bad := ~((seconds > 0) & np.isfinite(seconds))).any():
            at = int(bad.argmax())
            raise MetricError(
                f"Step {numbers[at]} took {seconds[at]} s.", why="A step time is a positive, finite number of seconds."
            )
        numbers = numbers if before is None else np.concatenate((before, numbers))
        if (falls := np.diff(numbers) <= 0).any():
            at = int(falls.argmax())
            raise MetricError(
                f"Step {numbers[at + 1]} follows step {numbers[at]}.", why="Steps are recorded once each, in rising order."
            )
        before = numbers[-1:].copy()


def _fixed(left: _Left, warmup: int) -> tuple[int, str]:
    skipped = bisect_right(range(len(left.seconds)), warmup, key=left.number)
    return skipped, f"steps up to {warmup} left out, as asked" if warmup > 0 else "all steps kept, as asked"


def _auto(left: _Left) -> tuple[int, str]:
    startup = int(left.number(0) == 1)
    slow = slow_prefix(left.seconds[startup:])
    if slow == 0:
        if startup:
            return 1, "step 1 left out (start-up); no slow first stretch after it"
        return 0, f"starts at the first recorded step, {left.number(0)}; no slow first stretch"
    before = "step 1 (start-up) and the slow stretch" if startup else "the slow stretch"
    last = left.number(startup + slow - 1)
    return startup + slow, f"{before} up to step {last} left out: slower than the later half by more than its noise"


# The steady steps as columns, so that millions of them cost a few numbers each.

PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a window keeps. Arrays have shape (n,)."""

    first: StepRecord
    last: StepRecord
    seconds: Array
    tokens: Array | None
    """None where a step does not tell."""
    peak_allocated_bytes: int | None
    """The largest of all."""
    peak_reserved_bytes: int | None
    not_finite: int


def kept_steps(steps: Sequence[StepRecord], window: Window) -> Kept:
    """The columns of the steps inside a window."""
    seconds, tokens, place = np.empty(window.steps), _Tokens(window.steps), 0
    largest, not_finite = [ABSENT, ABSENT], 0
    first: Rows | None = None
    last: Rows | None = None
    for block in blocks_of(steps):
        rows = block[(block["step"] >= window.first_step) & (block["step"] <= window.last_step)]
        if window.left_out:
            rows = rows[~np.isin(rows["step"], window.left_out)]
        if not len(rows):
            continue
        seconds[place : place + len(rows)] = rows["step_seconds"]
        tokens.add(place, rows["tokens"])
        largest = [max(most, int(rows[name].max())) for most, name in zip(largest, PEAKS, strict=True)]
        not_finite += int((~rows["finite"]).sum())
        first, last, place = rows[:1] if first is None else first, rows[-1:], place + len(rows)
    if first is None or last is None:
        raise MetricError("No step lies inside the window.")
    allocated, reserved = (None if most == ABSENT else most for most in largest)
    return Kept(
        first=record_of(first[0].item()),
        last=record_of(last[0].item()),
        seconds=seconds,
        tokens=tokens.whole(),
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        not_finite=not_finite,
    )


class _Tokens:
    """Tokens of each step, which are as good as always the same."""

    def __init__(self, steps: int) -> None:
        self._values = np.broadcast_to(np.float64(np.nan), (steps,))
        self._absent = False

    def add(self, place: int, counts: NDArray[np.int64]) -> None:
        """Those of the steps from `place` on."""
        self._absent = self._absent or bool((counts == ABSENT).any())
        if place == 0:
            self._values = np.broadcast_to(np.float64(counts[0]), self._values.shape)
        if (counts != self._values[place : place + len(counts)]).any():
            self._values = np.array(self._values)
            self._values[place : place + len(counts)] = counts

    def whole(self) -> Array | None:
        """None where a step does not tell."""
        return None if self._absent else self._values
