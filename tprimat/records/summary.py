"""Summarise the steps of a long run while they arrive: a million steps take no more memory than forty thousand.

Consecutive steps are merged into one record with their mean time: sums, and so throughput, stay what they are, and the scatter of
means of equally many steps still gives a valid interval of the mean. Up to MOST_STEPS nothing is merged.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, islice

from tprimat.records.schema import StepRecord

MOST_STEPS = 40_000
"""Records kept at most. The number halves when it is reached, and each then stands for twice as many steps."""


class StepSummary:
    """The steps of a run, merged where there are many."""

    def __init__(self) -> None:
        self._records: list[StepRecord] = []
        self._size = 1
        """Steps that a whole record stands for."""
        self._open: list[StepRecord] = []
        """Steps of the next record."""

    def add(self, step: StepRecord) -> None:
        """Take one more step."""
        if self._size == 1 or not self._records:  # the first step, with the start-up, stays by itself
            self._records.append(step)
        else:
            self._open.append(step)
            if sum(part.merged for part in self._open) >= self._size:
                self._records.append(merged(self._open))
                self._open = []
        if len(self._records) > MOST_STEPS:
            self._halve()

    def _halve(self) -> None:
        first, *rest = self._records
        pairs = [rest[place : place + 2] for place in range(0, len(rest), 2)]
        self._open = [*(pairs.pop() if len(pairs[-1]) == 1 else []), *self._open]
        self._records = [first, *map(merged, pairs)]
        self._size *= 2

    @property
    def last(self) -> StepRecord | None:
        """The newest record."""
        return self._open[-1] if self._open else self._records[-1] if self._records else None

    def __bool__(self) -> bool:
        """Return whether there is any step."""
        return bool(self._records)

    def steps(self) -> tuple[StepRecord, ...]:
        """Return what there is. The last record may stand for fewer steps than the others."""
        return (*self._records, *([merged(self._open)] if self._open else []))


def merged(parts: list[StepRecord]) -> StepRecord:
    """Return consecutive steps as one: the number of the last, mean times and tokens, the last loss, the worst memory."""
    last, count = parts[-1], sum(part.merged for part in parts)
    if len(parts) == 1:
        return last
    tokens = [part.tokens for part in parts]
    return replace(
        last,
        merged=count,
        step_seconds=sum(part.step_seconds * part.merged for part in parts) / count,
        tokens=None if None in tokens else round(sum((part.tokens or 0) * part.merged for part in parts) / count),
        finite=all(part.finite for part in parts),
        peak_allocated_bytes=largest(part.peak_allocated_bytes for part in parts),
        peak_reserved_bytes=largest(part.peak_reserved_bytes for part in parts),
    )


def largest(values: Iterable[int | None]) -> int | None:
    """Return the largest known value; None if none is known."""
    return max((value for value in values if value is not None), default=None)


def summarised(steps: Iterable[StepRecord]) -> tuple[StepRecord, ...]:
    """Return steps, merged where there are more than MOST_STEPS."""
    rest = iter(steps)
    found = tuple(islice(rest, MOST_STEPS + 1))
    if len(found) <= MOST_STEPS:
        return found
    summary = StepSummary()
    for step in chain(found, rest):
        summary.add(step)
    return summary.steps()
