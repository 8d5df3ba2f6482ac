import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from a_launch import processes_with, wait_for


@pytest.fixture
def cookie(monkeypatch):
    """A word in the environment of everything that a test starts, so that whatever it leaves behind can be found."""
    word = uuid.uuid4().hex
    monkeypatch.setenv("A_TEST_OF_LAUNCH", word)
    yield word
    for pid in processes_with(word) - {os.getpid()}:
        os.kill(pid, 9)


@pytest.fixture
def left_behind(cookie):
    """Asks which processes of the test still live."""
    return lambda: processes_with(cookie) - {os.getpid()}


@pytest.fixture
def launcher(cookie, tmp_path):
    """Starts a launcher of the fake trainer in a process of its own and waits until the trainer has made a step."""

    def start(*words):
        script = Path(__file__).parent / "a_launch.py"
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), *map(str, words)], stdout=subprocess.PIPE, text=True
        )
        wait_for((tmp_path / "steps.jsonl").exists)
        return process

    return start
