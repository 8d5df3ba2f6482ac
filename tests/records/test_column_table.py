"""Tables of rows: the same rows come back, whatever a block compresses to, in memory or from disk."""

import dataclasses

import numpy as np
import pytest

from tprimat.records import table
from tprimat.records.schema import StepRecord
from tprimat.records.steps import STEP_ROW, StepTable, column, record_of, rows_of
from tprimat.records.table import Table

BLOCK = 512
ROWS = 3 * BLOCK + 17


def step(number):
    return StepRecord(
        step=number,
        step_seconds=1 + number / 7,
        tokens=1000 if number % 5 else None,
        loss=None if number == 3 else 9 - number / ROWS,
        learning_rate=1e-5,
        finite=number != 4,
        peak_allocated_bytes=number // BLOCK or None,
    )


@pytest.fixture(params=[0, 1 << 30], ids=["on disk", "in memory"])
def steps(request, monkeypatch):
    monkeypatch.setattr(table, "BLOCK", BLOCK)
    monkeypatch.setattr(table, "KEPT_BYTES", request.param)
    return StepTable([step(number) for number in range(1, ROWS + 1)])


def test_every_record_comes_back(steps):
    assert list(steps) == [step(number) for number in range(1, ROWS + 1)]
    assert (steps[0], steps[-1], steps[BLOCK], steps[2:5]) == (step(1), step(ROWS), step(BLOCK + 1), (step(3), step(4), step(5)))
    with pytest.raises(IndexError):
        steps[ROWS]


def test_a_column_is_the_same_from_a_table_and_from_records(steps):
    records = tuple(steps)
    for field in dataclasses.fields(StepRecord):
        np.testing.assert_array_equal(column(steps, field.name), column(records, field.name))


@pytest.mark.parametrize("length", [0, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, ROWS, ROWS + 5])
def test_a_table_cut_back_grows_again(steps, length):
    kept = min(length, ROWS)
    steps.table.truncate(length)
    assert len(steps) == kept
    steps.table.append(rows_of([step(number) for number in range(kept + 1, ROWS + 1)]))
    assert list(steps) == [step(number) for number in range(1, ROWS + 1)]


def test_a_row_is_found_and_replaced(steps):
    for number in (1, BLOCK, BLOCK + 1, ROWS):
        assert steps.table.search("step", number) == number - 1
        steps.table.replace(number - 1, rows_of([dataclasses.replace(step(number), loss=0.25)]))
        assert steps[number - 1].loss == 0.25
    assert (steps.table.search("step", 0), steps.table.search("step", ROWS + 9)) == (0, ROWS)
    assert sum(row.loss == 0.25 for row in steps) == 4


def test_rows_have_the_fields_of_a_record():
    assert STEP_ROW.names == tuple(field.name for field in dataclasses.fields(StepRecord))
    assert record_of(rows_of([step(3)])[0].item()) == step(3)


def test_a_full_disk_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(table, "KEPT_BYTES", 0)
    monkeypatch.setattr(table.tempfile, "tempdir", str(tmp_path / "gone"))
    made = Table(np.dtype([("x", "f8")]))
    with pytest.raises(table.RecordError, match="no room for a table"):
        made.append(np.array([(number**0.5,) for number in range(table.BLOCK)], made.dtype))
