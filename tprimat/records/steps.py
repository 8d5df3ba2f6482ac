"""Steps as columns: what an analysis of millions of them needs, and a sequence of StepRecords for everything else."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tprimat.records.schema import StepRecord
from tprimat.records.table import BLOCK, Rows, Table

ABSENT = -1
"""Stands for None in a column of whole numbers; NaN does in a column of floats."""

STEP_ROW = np.dtype(
    [
        ("step", "i8"),
        ("step_seconds", "f8"),
        ("tokens", "i8"),
        ("loss", "f8"),
        ("grad_norm", "f8"),
        ("learning_rate", "f8"),
        ("finite", "?"),
        ("peak_allocated_bytes", "i8"),
        ("peak_reserved_bytes", "i8"),
        ("ended_at_seconds", "f8"),
    ]
)
"""The fields of StepRecord, in their order."""


def _cells(step: StepRecord) -> tuple[Any, ...]:
    return tuple(
        (ABSENT if STEP_ROW[index].kind == "i" else np.nan) if value is None else value
        for index, value in enumerate(astuple(step))
    )


def rows_of(steps: Sequence[StepRecord]) -> Rows:
    """Records as rows."""
    return np.array([_cells(step) for step in steps], STEP_ROW)


def record_of(row: tuple[Any, ...]) -> StepRecord:
    """A row, as `tolist` gives it, as a record."""
    values = {name: _value(cell) for name, cell in zip(STEP_ROW.names or (), row, strict=True)}
    return StepRecord(**values)


def _value(cell: Any) -> Any:
    absent = math.isnan(cell) if isinstance(cell, float) else cell == ABSENT
    return None if absent else cell


class StepTable(Sequence[StepRecord]):
    """A sequence of StepRecords that keeps columns."""

    def __init__(self, steps: Sequence[StepRecord] = ()) -> None:
        self.table = Table(STEP_ROW)
        for start in range(0, len(steps), BLOCK):
            self.table.append(rows_of(steps[start : start + BLOCK]))

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StepRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | tuple[StepRecord, ...]:
        if isinstance(index, slice):
            return tuple(self[position] for position in range(*index.indices(len(self))))
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(index)
        return record_of(self.table.row(position)[0].item())

    def __iter__(self) -> Iterator[StepRecord]:
        for block in self.table.blocks():
            yield from map(record_of, block.tolist())


def blocks_of(steps: Sequence[StepRecord]) -> Iterator[Rows]:
    """Steps in blocks of rows."""
    if isinstance(steps, StepTable):
        yield from steps.table.blocks()
    else:
        for start in range(0, len(steps), BLOCK):
            yield rows_of(steps[start : start + BLOCK])


def column(steps: Sequence[StepRecord], name: str) -> NDArray[Any]:
    """One field of all steps, shape (n,); absent ones are NaN or ABSENT."""
    if isinstance(steps, StepTable):
        return steps.table.column(name)
    absent = ABSENT if STEP_ROW[name].kind == "i" else np.nan
    values = (getattr(step, name) for step in steps)
    return np.fromiter((absent if value is None else value for value in values), STEP_ROW[name], len(steps))
