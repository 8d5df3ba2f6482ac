import dataclasses
import json
import os
import subprocess
import sys

import pytest
from a_launch import Notes, a_launch, first_record
from changes import evidence

from tprimat.core.errors import RecordError, UserError
from tprimat.engines.base import Command
from tprimat.launch.run import run
from tprimat.records.schema import StepRecord
from tprimat.records.store import RunDirectory, to_json


def launched(*args, **kwargs):
    notes = Notes()
    return (*run(a_launch(*args, **kwargs), notes), notes)


@pytest.mark.parametrize(("steps", "outcome"), [(3, "failed"), (19, "failed"), (20, "completed")])
def test_exit_status_0_before_the_planned_step_is_a_failure(tmp_path, steps, outcome):
    record, made, _ = launched(tmp_path, "steps", steps, planned_steps=20)
    assert (record.outcome, len(made)) == (outcome, steps)
    assert record.cause == (f"The process ended with exit status 0 after step {steps} of 20." if outcome == "failed" else None)


def test_a_run_that_completes_leaves_its_steps_its_log_with_a_heading_and_its_outcome(tmp_path, left_behind):
    other = tmp_path / "training_llama.log"
    words = ("line", "hello", "steps", 3, "line", "bye")
    record, steps, notes = launched(tmp_path, *words, logs=(other,), heading="Using parallelism strategy: minimal")
    assert (record.outcome, record.exit_code, record.cause) == ("completed", 0, None)
    assert record.ended_at is not None
    assert [step.step for step in notes.steps] == [1, 2, 3]
    assert tuple(notes.steps) == steps
    assert notes.lines == ["hello", "bye"]
    log = b"Using parallelism strategy: minimal\nhello\nbye\n"
    assert other.read_bytes() == (tmp_path / "training.log").read_bytes() == log
    assert json.loads((tmp_path / "run.json").read_text())["outcome"] == "completed"
    assert not left_behind()


def test_the_last_line_counts_without_its_end_and_broken_text_is_kept(tmp_path):
    *_, notes = launched(tmp_path, "line", "\\xff\\xfe", "print", "10%\\r", "print", "20%\\r\\n", "print", "the end", "steps", 1)
    assert notes.lines == ["\ufffd\ufffd", "10%", "20%", "the end"]
    assert (tmp_path / "training.log").read_bytes() == b"\xff\xfe\n10%\r20%\r\nthe end"


def test_a_log_longer_than_a_pipe_arrives_whole(tmp_path):
    text = b"".join(b"line %d\n" % number for number in range(200_000))
    (tmp_path / "long.log").write_bytes(text)
    *_, notes = launched(tmp_path, "replay", tmp_path / "long.log", "steps", 1)
    assert (tmp_path / "training.log").read_bytes() == text
    assert len(notes.lines) == 200_000


def test_a_limit_of_file_sizes_leaves_no_running_record(tmp_path, monkeypatch):
    write, limit = RunDirectory.write_run, 1_000_000

    def limited(directory, record):
        if len(to_json(record)) > limit:
            raise RecordError("run.json cannot be written: File too large.")
        write(directory, record)

    long = {"evidence": evidence(notes=("x" * limit,))}
    monkeypatch.setattr(RunDirectory, "write_run", limited)
    (tmp_path / "half.json").write_text(to_json(dataclasses.replace(first_record(), **long)))
    launched(tmp_path, "run-record", tmp_path / "half.json", "steps", 1)
    kept = RunDirectory(tmp_path).read_run()
    assert (kept.outcome, kept.cause) == ("failed", "run.json cannot be written: File too large.")


def test_a_worker_that_died_while_writing_its_record_does_not_hide_the_run(tmp_path):
    (tmp_path / "half.json").write_text('{"run_id": ')
    record, *_ = launched(tmp_path, "run-record", tmp_path / "half.json", "exit", 1)
    assert (record.run_id, record.outcome) == ("r1", "failed")


def test_a_full_disk_under_the_log_is_said_once_and_the_run_goes_on(tmp_path):
    (tmp_path / "training.log").symlink_to("/dev/full")
    record, steps, notes = launched(tmp_path, "line", "one", "steps", 2, "line", "two", "steps", 2)
    assert record.outcome == "completed"
    assert len(steps) == 4
    assert len(notes.notices) == 1
    assert "No space left on device" in notes.notices[0]


def test_steps_from_the_log_that_cannot_be_written_survive_in_the_result(tmp_path):
    (tmp_path / "steps.jsonl").mkdir()
    record, steps, notes = launched(tmp_path, "line", "x", step_of_line=lambda text: StepRecord(step=1, step_seconds=0.5))
    assert (record.outcome, f"{tmp_path}/steps.jsonl cannot be written" in record.cause) == ("failed", True)
    assert [step.step for step in steps] == [1]
    assert len(notes.notices) == 1


def test_a_damaged_step_is_passed_over_and_said(tmp_path):
    (tmp_path / "steps.jsonl").write_text("")
    command = Command(
        argv=(
            "sh",
            "-c",
            f'echo "{{}}" >> {tmp_path}/steps.jsonl; echo \'{{"step": 1, "step_seconds": 2}}\' >> {tmp_path}/steps.jsonl',
        )
    )
    _, steps, notes = launched(tmp_path, command=command)
    assert [step.step_seconds for step in steps] == [2.0]
    assert notes.notices[0].startswith(f"Skipped a line of {tmp_path}/steps.jsonl")


def test_a_command_runs_where_and_with_what_it_asks_for(tmp_path):
    file = str(tmp_path / "deep" / "experiment.yaml")
    argv = ("sh", "-c", 'echo $COLOR; pwd; cat "$0"', file)
    command = Command(argv=argv, environment={"COLOR": "green"}, directory="/", files={file: "a: 1\n"})
    *_, notes = launched(tmp_path, command=command)
    assert notes.lines == ["green", "/", "a: 1"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (Command(argv=("no-such-program",)), "no-such-program cannot be started: No such file or directory."),
        (Command(argv=("true",), directory="/no/such/folder"), "The working directory /no/such/folder does not exist."),
        (Command(argv=("true",), files={"/dev/null/x": ""}), "/dev/null/x cannot be written"),
        (Command(argv=("true",), files={"/dev/full": "x"}), "/dev/full cannot be written: No space left on device"),
    ],
)
def test_a_command_that_cannot_start_is_a_users_error(tmp_path, command, message):
    with pytest.raises(UserError, match=message):
        run(a_launch(tmp_path, command=command), Notes())
    left = json.loads((tmp_path / "run.json").read_text())
    assert (left["outcome"], message in left["cause"]) == ("failed", True)


def test_a_watcher_that_breaks_leaves_a_record_that_says_so_and_no_process_behind(tmp_path, left_behind):
    notes = Notes()
    notes.on_step = lambda step: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(a_launch(tmp_path, "steps", 1, "sleep", 100), notes)
    assert "ZeroDivisionError" in json.loads((tmp_path / "run.json").read_text())["cause"]
    assert not left_behind()


def test_what_the_log_told_is_added_to_the_last_record(tmp_path):
    def complete(record):
        told = dataclasses.replace(record, mismatches=("tensor_parallel: 2 was asked for, 1 ran",))
        return told, (StepRecord(step=1, step_seconds=9.0),)

    record, steps, _ = launched(
        tmp_path, "line", "x", complete=complete, step_of_line=lambda text: StepRecord(step=1, step_seconds=1)
    )
    assert record.outcome == "completed"
    assert [step.step_seconds for step in steps] == [9.0]
    assert RunDirectory(tmp_path).read_steps() == steps
    assert not RunDirectory(tmp_path).read_run().counts


@pytest.mark.parametrize("has_bytecode", [False, True])
def test_ranks_keep_the_bytecode_of_an_image_that_has_none(tmp_path, has_bytecode):
    torch = tmp_path / "site" / "torch" / "__init__.py"
    torch.parent.mkdir(parents=True)
    torch.touch()
    if has_bytecode:
        (torch.parent / "__pycache__").mkdir()
    asks = "import json; from tprimat.launch.process import bytecode_cache; print(json.dumps(bytecode_cache()))"
    image = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(tmp_path)}
    image.pop("PYTHONPYCACHEPREFIX", None)
    variables = json.loads(subprocess.check_output([sys.executable, "-c", asks], env=image))
    subprocess.run([sys.executable, "-c", "import torch"], env={**image, **variables}, check=True)
    assert bool(list((tmp_path / "tprimat").rglob("torch/__init__.*.pyc"))) is not has_bytecode
