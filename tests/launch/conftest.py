import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from a_launch import TRAINER, processes_with, wait_for
from commands import FAKE_PACKAGES, fake_nvml


@pytest.fixture
def cookie(monkeypatch):
    """Mark everything that a test starts with a word in its environment, to find what it leaves behind."""
    word = uuid.uuid4().hex
    monkeypatch.setenv("A_TEST_OF_LAUNCH", word)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # an ignored SIGHUP would be inherited from nohup, and stay ignored
    yield word
    signal.signal(signal.SIGHUP, hangup)
    for pid in processes_with(word) - {os.getpid()}:
        os.kill(pid, 9)


@pytest.fixture
def left_behind(cookie):
    """Return the processes of the test that are still alive."""
    return lambda: processes_with(cookie) - {os.getpid()}


@pytest.fixture
def nvml(monkeypatch):
    """Replace pynvml, in this process and in those that it starts, and return a function that sets the GPUs it reports."""
    for name in ("FAKE_GPUS", "FAKE_DRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(FAKE_PACKAGES))
    with fake_nvml():
        yield lambda *gpus: monkeypatch.setenv("FAKE_GPUS", json.dumps(gpus))


@pytest.fixture
def tool(tmp_path, monkeypatch, nvml):
    """Put a shell program on PATH, before those of the system; NVML finds no driver."""
    del nvml
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    def make(name, script):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    return make


@pytest.fixture
def launcher_of(cookie, tmp_path):
    """Start a launcher of a command in a process of its own."""

    def start(argv, grace=2.0):
        script = Path(__file__).parent / "a_launch.py"
        command = [sys.executable, str(script), str(tmp_path), str(grace), *map(str, argv)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    return start


@pytest.fixture
def launcher(launcher_of, tmp_path):
    """Start a launcher of the fake trainer and wait until the trainer has made a step."""

    def start(*words, grace=2.0):
        process = launcher_of([*TRAINER, *words], grace)
        wait_for((tmp_path / "steps.jsonl").exists)
        return process

    return start
