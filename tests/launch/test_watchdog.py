import os
import re
import stat
import sys
import time
from pathlib import Path

import pytest
from a_launch import Notes, a_launch

from tprimat.launch import process
from tprimat.launch.run import run
from tprimat.launch.watchdog import Limits, Watchdog, find_py_spy


def test_a_run_that_does_not_start_is_stopped(tmp_path, left_behind):
    record, _ = run(a_launch(tmp_path, "sleep", 100, limits={"startup_timeout_seconds": 0.4}), Notes())
    assert record.outcome == "timed_out"
    assert "No step finished within startup_timeout_seconds (0.4 s)" in record.cause
    assert not left_behind()


def test_a_run_that_takes_too_long_is_stopped_and_keeps_its_steps(tmp_path, left_behind, monkeypatch):
    late = []
    monkeypatch.setattr(process, "monotonic", lambda: time.monotonic() + 1000.0 * len(late))
    notes = Notes()
    notes.on_step = lambda step: late.append(1) if step.step == 3 else None
    launch = a_launch(tmp_path, "pace", 0.01, "steps", 1000, limits={"run_timeout_seconds": 900.0}, planned_steps=1000)
    record, result = run(launch, notes)
    assert record.outcome == "timed_out"
    last = re.search(r"the last was step (\d+) of 1000", record.cause)
    assert 3 <= int(last[1]) <= result.steps[-1].step < 1000  # a step may end while the run is being stopped
    assert not left_behind()


def test_a_limit_that_a_program_derived_is_told_by_the_flag_that_raises_it():
    own, derived = watchdog(run_timeout_seconds=20.0), watchdog(run_timeout_seconds=20.0, run_timeout_flag="--time-budget")
    assert verdicts(own, 0.0, 21.0).hint == "raise benchmarking.run_timeout_seconds, or ask for fewer steps"
    verdict = verdicts(derived, 0.0, 21.0)
    assert verdict.hint == "raise --time-budget, or ask for fewer steps"
    assert "longer than --time-budget allows (20 s)" in verdict.cause


HANGS = {"hang_factor": 3.0, "hang_minimum_seconds": 0.5}


def test_a_hung_run_is_stopped_also_without_py_spy(tmp_path, left_behind, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    notes = Notes()
    record, _ = run(a_launch(tmp_path, "steps", 3, "sleep", 100, limits=HANGS, planned_steps=9), notes)
    assert record.outcome == "hung"
    assert "the last was step 3 of 9" in record.cause
    assert any("py-spy is not installed" in notice for notice in notes.notices)
    assert not left_behind()


def test_a_worker_that_asked_for_it_prints_its_stacks_before_it_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    notes = Notes()
    run(a_launch(tmp_path, "faulthandler", "SIGUSR1", "steps", 3, "sleep", 100, limits=HANGS), notes)
    assert any("fake_trainer.py" in line and "in main" in line for line in notes.lines)


def test_py_spy_writes_the_stacks_into_the_runs_folder(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "py-spy"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "stack of $3"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    run(a_launch(tmp_path / "run", "steps", 3, "sleep", 100, limits=HANGS), Notes())
    assert (tmp_path / "run" / "stacks.txt").read_text().startswith("stack of ")


def test_py_spy_is_found_beside_a_python_whose_environment_is_not_activated(tmp_path, monkeypatch):
    tool = tmp_path / "py-spy"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_py_spy() is None or Path(find_py_spy()).parent == Path(sys.executable).parent
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_py_spy() == str(tool)


def test_a_process_that_does_not_end_after_its_last_step_is_hung(tmp_path):
    record, result = run(a_launch(tmp_path, "steps", 3, "sleep", 100, limits=HANGS, planned_steps=3), Notes())
    assert record.outcome == "hung"
    assert "all 3 steps finished, but the processes did not end" in record.cause
    assert len(result.steps) == 3


def watchdog(**limits):
    given = {"startup_timeout_seconds": 100.0, "hang_factor": 10.0, "hang_minimum_seconds": 5.0, **limits}
    return Watchdog(Limits(**given), started=0.0)


def verdicts(dog, start, end):
    """The last verdict of a launcher that looks every second."""
    found = None
    for tenth in range(int(start * 10), int(end * 10), 10):
        found = dog.verdict(tenth / 10) or found
    return dog.verdict(end) or found


def test_a_launcher_that_slept_does_not_blame_the_run():
    dog = watchdog()
    dog.saw_step(1, 0.1, now=1.0)
    dog.verdict(1.1)
    assert dog.verdict(500.0) is None
    assert verdicts(dog, 500.0, 506.0).outcome == "hung"


def test_slow_steps_are_given_more_time():
    dog = watchdog()
    for step in range(1, 4):
        dog.saw_step(step, 2.0, now=2.0 * step)
        dog.verdict(2.0 * step)
    assert verdicts(dog, 6.0, 25.9) is None
    assert dog.verdict(26.1).outcome == "hung"


def test_fast_steps_are_given_the_minimum():
    dog = watchdog()
    for step in range(1, 4):
        dog.saw_step(step, 0.01, now=0.01 * step)
    assert verdicts(dog, 0.0, 5.0) is None
    assert dog.verdict(5.1).outcome == "hung"


def test_a_framework_that_reports_every_tenth_step_is_not_hung_between_reports():
    dog = watchdog()
    for report in range(1, 4):
        dog.saw_step(10 * report, 1.0, now=10.0 * report)
    assert verdicts(dog, 30.0, 90.0) is None


@pytest.mark.parametrize(("now", "outcome"), [(99.0, None), (101.0, "timed_out")])
def test_the_first_step_has_a_time_of_its_own(now, outcome):
    verdict = verdicts(watchdog(), 0.0, now)
    assert (verdict.outcome if verdict else None) == outcome


def test_the_monotonic_clock_is_the_one_used(tmp_path):
    began = time.monotonic()
    _, result = run(a_launch(tmp_path, "steps", 1), Notes())
    assert 0 < result.duration_seconds <= time.monotonic() - began


def test_a_run_that_was_stopped_for_its_silence_shows_what_its_log_says(tmp_path):
    words = ("line", "ProcessGroupNCCL's watchdog got stuck for 480 seconds", "steps", 1, "sleep", 100)
    record, _ = run(a_launch(tmp_path, *words, limits=HANGS), Notes())
    assert record.outcome == "hung"
    assert "The log says: ProcessGroupNCCL's watchdog got stuck" in record.cause
