"""The streamed file is the text that json.dumps makes of the whole document."""

import json

import pytest
from test_store import a_run

from tprimat.records.benchmark_file import benchmark_document, read_benchmark_file, write_benchmark_file
from tprimat.records.schema import StepRecord
from tprimat.records.steps import StepTable
from tprimat.records.table import BLOCK


def varied(number):
    return StepRecord(
        step=number,
        step_seconds=0.1 * number,
        tokens=4096,
        loss=None if number == 2 else 11.0 / number,
        learning_rate=3e-5 / number,
        finite=number != 2,
        peak_allocated_bytes=None if number < 3 else 97_000_000_000 + number,
    )


@pytest.mark.parametrize("count", [0, 1, 5, 2 * BLOCK + 3])
@pytest.mark.parametrize("kind", [tuple, StepTable])
def test_the_file_is_what_json_would_write(tmp_path, count, kind):
    steps = tuple(varied(number) for number in range(1, count + 1))
    path = tmp_path / "b.json"
    write_benchmark_file(path, a_run(), kind(steps), None)
    assert path.read_text() == json.dumps(benchmark_document(a_run(), steps, None), indent=2, allow_nan=False) + "\n"
    assert read_benchmark_file(path).steps == steps


def test_a_disk_that_fills_leaves_the_old_file(tmp_path):
    path = tmp_path / "b.json"
    path.write_text("old")

    class Broken(StepTable):
        def __len__(self):
            raise OSError(28, "No space left on device")

    with pytest.raises(Exception, match="No space left"):
        write_benchmark_file(path, a_run(), Broken(), None)
    assert [file.name for file in tmp_path.iterdir()] == ["b.json"]
    assert path.read_text() == "old"
