import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from a_launch import TRAINER, processes_with, wait_for


@pytest.fixture
def cookie(monkeypatch):
    """A word in the environment of everything that a test starts, so that whatever it leaves behind can be found."""
    word = uuid.uuid4().hex
    monkeypatch.setenv("A_TEST_OF_LAUNCH", word)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's deafness to it would be inherited, and rightly kept
    yield word
    signal.signal(signal.SIGHUP, hangup)
    for pid in processes_with(word) - {os.getpid()}:
        os.kill(pid, 9)


@pytest.fixture
def left_behind(cookie):
    """Asks which processes of the test still live."""
    return lambda: processes_with(cookie) - {os.getpid()}


@pytest.fixture
def launcher_of(cookie, tmp_path):
    """Starts a launcher of a command in a process of its own."""

    def start(argv):
        script = Path(__file__).parent / "a_launch.py"
        command = [sys.executable, str(script), str(tmp_path), *map(str, argv)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    return start


@pytest.fixture
def launcher(launcher_of, tmp_path):
    """Starts a launcher of the fake trainer and waits until the trainer has made a step."""

    def start(*words):
        process = launcher_of([*TRAINER, *words])
        wait_for((tmp_path / "steps.jsonl").exists)
        return process

    return start
