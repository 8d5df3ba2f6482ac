"""What a user sees until the first step: no start is silent for more than ten seconds."""

import io
import sys
from dataclasses import replace

import pytest
from planning import make_plan

from tprimat.plan.schema import RunPlan
from tprimat.records.schema import StartUp
from tprimat.runner.run import Progress
from tprimat.runner.waiting import AWAITED
from tprimat.train import startup


@pytest.fixture
def plan(tmp_path) -> RunPlan:
    return make_plan(tmp_path, "llama", {})


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines_after(progress, capsys, *seconds):
    for moment in seconds:
        progress.on_wait(moment)
    return capsys.readouterr().err.splitlines()


def test_without_a_terminal_a_line_comes_after_ten_seconds_and_then_each_minute(plan, capsys):
    progress = Progress(plan, None, quiet=False)
    assert lines_after(progress, capsys, 0.1, 5.0, 9.9) == []
    assert lines_after(progress, capsys, 10.0, 10.1, 59.9) == [
        "  llama waits for torchrun to start the ranks, 10 s since the start"
    ]
    suspicion, line = lines_after(progress, capsys, 60.0, 60.1, 119.9)
    assert "imports torch first" in suspicion
    assert suspicion.endswith("training.log")
    assert line.endswith("60 s since the start")
    assert len(lines_after(progress, capsys, 120.0, 121.0, 180.0, 200.0)) == 2


def test_the_line_names_what_the_log_says_is_next(plan, capsys):
    progress = Progress(plan, None, quiet=False)
    progress.on_line("[rank0]: tprimat start-up: imported")
    progress.on_line("a line of a library")
    (line,) = lines_after(progress, capsys, 12.0)
    assert "waits for the ranks to connect" in line
    assert "NCCL_DEBUG" in lines_after(progress, capsys, 61.0)[0]


def test_on_a_terminal_the_line_is_renewed_each_second(plan, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress(plan, None, quiet=False)
    for tenth in range(45):
        progress.on_wait(tenth / 10)
    assert terminal.getvalue().count("\r") == 4
    assert "\n" not in terminal.getvalue()


def test_a_framework_that_only_prints_is_quoted(plan, capsys):
    progress = Progress(replace(plan, engine="primus"), None, quiet=False)
    progress.on_line("building the datasets")
    (line,) = lines_after(progress, capsys, 11.0)
    assert "waits for primus's first step (building the datasets)" in line


def test_quiet_is_quiet(plan, capsys):
    assert lines_after(Progress(plan, None, quiet=True), capsys, 11.0, 61.0, 999.0) == []


def test_every_stage_that_is_announced_is_understood(capsys):
    for stage in (stage for stage in AWAITED if stage):
        startup.announce(stage)
        assert startup.stage_of_line(capsys.readouterr().out) == stage
    assert set(AWAITED) == {None, *StartUp.__args__}
    assert startup.stage_of_line("tprimat start-up: nonsense") is None
