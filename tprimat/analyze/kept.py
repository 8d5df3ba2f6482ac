"""The steady steps as columns, so that millions of them cost a few numbers each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tprimat.analyze.statistics import Array
from tprimat.errors import MetricError
from tprimat.record.derived import Window
from tprimat.record.schema import StepRecord
from tprimat.record.steps import ABSENT, blocks_of, record_of
from tprimat.record.table import Rows

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
