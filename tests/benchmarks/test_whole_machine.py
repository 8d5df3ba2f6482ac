"""benchmarks/whole_machine.py: its commands are valid, and a series that is cut into calls makes each step once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import engine_speed  # noqa: E402
from speed_programs import Program  # noqa: E402
from whole_machine import Step, series, steps  # noqa: E402

from tprimat.cli import main as commands  # noqa: E402

SLOW = "import sys, time; sys.stdout.write('begins '); sys.stdout.flush(); time.sleep(60)"


PROGRAMS = [
    Program(name="megatron", engine="megatron", software={}),
    Program(name="transformer_engine", engine="megatron", software={}),
    Program(name="nemo", engine="nemo", software={}, python="/nemo/python", settings=("nemo.cross_entropy_fusion_impl=te",)),
]


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_every_command_is_understood_by_its_program(gpus, tmp_path):
    made = {step.name: step for step in steps(gpus, tmp_path, PROGRAMS)}
    assert next(iter(made)) == "probes"
    assert {name for name in made if "strategies" in name} == ({"strategies-megatron", "strategies-nemo"} if gpus == 8 else set())
    for name, step in made.items():
        if step.knows_limit:
            options = engine_speed.parser().parse_args([*step.words[2:], "--time-limit", "5"])
            assert (options.gpus, options.rounds, options.against) == (gpus, 3, "transformer_engine")
        else:
            command, *words = step.words[3:]
            commands.parser_of(command, command).parse_args(words)
        assert (step.words[0] == "/nemo/python") == (name == "strategies-nemo")


def python(name, folder, code, **more):
    return Step(name=name, words=(sys.executable, "-c", code), folder=folder, **more)


def counting(file):
    """Code that notes each time it runs."""
    return f"open({str(file)!r}, 'a').write('x')"


def test_each_step_runs_once_and_a_failure_stops_no_other(tmp_path, capsys):
    made = [
        python("first", tmp_path / "a", counting(tmp_path / "first")),
        python("fails", tmp_path, f"{counting(tmp_path / 'fails')}; raise SystemExit(3)"),
        python("last", tmp_path, counting(tmp_path / "last")),
    ]
    assert [series(made, tmp_path, None) for _ in range(2)] == [1, 1]
    assert [(tmp_path / name).read_text() for name in ("first", "fails", "last")] == ["x", "x", "x"]
    assert json.loads((tmp_path / "done.json").read_text()) == {"first": 0, "fails": 3, "last": 0}
    assert "nothing is left\nfailed: fails; --retry NAME" in capsys.readouterr().out


def children_of(process):
    return [Path("/proc", pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, SLOW), (signal.SIGTERM, SLOW), (signal.SIGINT, DEAF + SLOW)],
    ids=["ctrl_c", "term", "a_step_that_does_not_listen"],
)
def test_who_stops_the_series_stops_the_step(number, code, tmp_path):
    benchmark = tmp_path / "benchmark.py"
    text = (ROOT / "benchmarks" / "whole_machine.py").read_text(encoding="utf8")
    text = text.replace("ROOT = Path(__file__).resolve().parent.parent", f"ROOT = Path({str(ROOT)!r})")
    step = f'Step(name="slow", words=(sys.executable, "-c", {code!r}), folder=output)'
    text = text.replace("chosen = steps(gpus, output, programs_here(asked))", f"chosen = [{step}]")
    text = text.replace("TO_KILL_SECONDS = 20.0", "TO_KILL_SECONDS = 2.0")
    benchmark.write_text(text, encoding="utf8")
    command = [sys.executable, str(benchmark), "--gpus", "1", "--output", "out"]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = ""
    while "slow:" not in line:
        line = running.stdout.readline()
    while not (children := children_of(running)):
        time.sleep(0.05)
    time.sleep(1)
    os.kill(running.pid, number)
    _, said = running.communicate(timeout=30)
    assert not any(child.exists() for child in children)
    assert running.returncode == 128 + number
    assert said.endswith("stopped; the same call continues from here\n")
    assert "whole_machine" not in said
