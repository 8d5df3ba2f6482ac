import json
import math
import os

import pytest
from runs.make_runs import a_run

from tprimat.core.errors import RecordError
from tprimat.records.schema import StepRecord
from tprimat.records.store import RunDirectory


def test_a_run_and_its_steps_come_back_as_they_were_written(tmp_path):
    folder = RunDirectory(tmp_path)
    steps = tuple(StepRecord(step=i, step_seconds=0.1 / 3 * i, tokens=128, loss=1 / i) for i in (1, 2, 3))
    folder.write_run(a_run("r1"))
    for step in steps:
        folder.append_step(step)
    assert folder.read_run() == a_run("r1")
    assert folder.read_steps() == steps


@pytest.mark.parametrize("line", ['{"step":"x"}', '{"step":2,"step_seconds":1.0,"speed":7}'])
def test_a_broken_line_in_the_middle_and_an_unknown_key_are_errors_with_their_place(tmp_path, line):
    folder = RunDirectory(tmp_path)
    folder.steps_file.write_text(f'{{"step":1,"step_seconds":1.0}}\n{line}\n{{"step":3,"step_seconds":1.0}}\n')
    with pytest.raises(RecordError, match="steps.jsonl:2") as caught:
        folder.read_steps()
    assert "speed" in str(caught.value) or "speed" not in line


def test_a_loss_that_is_not_a_number_is_written_as_null(tmp_path):
    folder = RunDirectory(tmp_path)
    folder.append_step(StepRecord(step=1, step_seconds=1.0, loss=math.nan, finite=False))
    assert json.loads(folder.steps_file.read_text())["loss"] is None


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's always-full device")
def test_a_full_disk_is_a_clear_error(tmp_path):
    folder = RunDirectory(tmp_path)
    folder.steps_file.symlink_to("/dev/full")
    with pytest.raises(RecordError, match="No space left"):
        folder.append_step(StepRecord(step=1, step_seconds=1.0))


@pytest.mark.parametrize("torn", ['{"step": 2, "step_sec', '{"step": 2}{"step"', "x" * 20000])
def test_a_line_that_a_kill_cut_short_makes_way_for_the_next(tmp_path, torn):
    run = RunDirectory(tmp_path)
    first, second = StepRecord(step=1, step_seconds=1.0), StepRecord(step=2, step_seconds=2.0)
    run.append_step(first)
    with run.steps_file.open("a") as file:
        file.write(torn)
    assert run.read_steps() == (first,)
    run.append_step(second)
    assert run.read_steps() == (first, second)
