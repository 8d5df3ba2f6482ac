"""./benchmark.py with a fake Primus under faults: two at once, a reader who stalls, signals, no folder, no space."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from commands import ROOT
from fake_primus import make_machine
from launch.a_launch import wait_for


@pytest.fixture
def launcher(tmp_path):
    machine, started = make_machine(tmp_path), []

    def start(script, *words, act="once", before=(), environment=None, **how):
        kept = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
        environment = {**kept, **machine, "FAKE_PRIMUS": act, **(environment or {})}
        command = [*before, sys.executable, str(ROOT / script), *map(str, words)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **{**pipes, **how})
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def benchmark(launcher, *words, **how):
    return launcher("benchmark.py", "--model", "llama", "--steps", "6", *words, **how)


def hanging(launcher, folder, **how):
    process = benchmark(launcher, "--output-dir", folder, act="hang", **how)
    wait_for(lambda: list(folder.glob("runs/*/steps.jsonl")))
    return process


def outcomes(folder):
    return sorted(json.loads(path.read_text())["outcome"] for path in folder.glob("runs/*/run.json"))


def test_the_second_launcher_is_refused_reading_is_not_and_a_killed_one_leaves_no_lock(launcher, tmp_path):
    folder = tmp_path / "out"
    first = hanging(launcher, folder)
    log = (folder / "training_llama.log").read_bytes()
    second = benchmark(launcher, "--output-dir", folder)
    out, err = second.communicate(timeout=60)
    assert (second.returncode, out) == (2, "")
    assert err.startswith(f"error: The output folder {folder} is in use.\n"), err
    assert f"It is held by process {first.pid} on this machine" in err
    probing = launcher("tprimat/__main__.py", "probe", "memory", "--output", folder)
    assert "is in use" in probing.communicate(timeout=60)[1]
    assert probing.returncode == 2
    assert (folder / "training_llama.log").read_bytes().startswith(log), "the first goes on, perhaps"
    elsewhere = benchmark(launcher, "--output-dir", tmp_path / "other")
    assert elsewhere.wait(60) == 0
    reader = launcher("compare.py", "--results-dir", folder, tmp_path / "other")
    out, err = reader.communicate(timeout=60)
    assert reader.returncode == 0, err
    assert "no end was recorded" in out + err
    first.send_signal(signal.SIGKILL)
    first.wait()
    (killed,) = folder.glob("runs/*")
    (killed / f".run.json.{first.pid}").write_text("{half")
    third = benchmark(launcher, "--output-dir", folder)
    assert third.wait(60) == 0, third.communicate()
    assert outcomes(folder) == ["completed", "interrupted"]
    assert "its launcher is gone: now interrupted" in third.stderr.read()
    assert not list(killed.glob(".*"))


@pytest.fixture
def terminal():
    """Both ends of a terminal that nobody reads, and that is full."""
    ours, theirs = pty.openpty()
    os.set_blocking(theirs, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(theirs, b"x" * 1000)
    os.set_blocking(theirs, True)
    yield ours, theirs
    os.close(ours)


def on(terminal):
    return dict.fromkeys(("stdin", "stdout", "stderr"), terminal[1])


def read_all(terminal):
    os.close(terminal[1])
    text = b""
    while True:
        try:
            text += os.read(terminal[0], 1 << 16)
        except OSError:  # nobody holds the other end any more
            return text.decode()


def test_a_terminal_that_nobody_reads_stops_no_training_and_shows_the_summary_later(launcher, terminal, tmp_path):
    folder = tmp_path / "out"
    process = benchmark(launcher, "--steps", "2000", "--output-dir", folder, **on(terminal))
    wait_for(lambda: outcomes(folder) == ["completed"])
    assert process.poll() is None, "the summary waits for its reader"
    text = read_all(terminal)
    assert process.wait(60) == 0
    assert "tokens/s/GPU" in text
    assert sum(b"iteration" in line for line in (folder / "training_llama.log").open("rb")) >= 2000


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_a_run_whose_terminal_nobody_reads(number, status, launcher, terminal, tmp_path):
    folder = tmp_path / "out"
    process = hanging(launcher, folder, **on(terminal))
    process.send_signal(number)
    assert process.wait(20) == status
    assert outcomes(folder) == ["interrupted"]
