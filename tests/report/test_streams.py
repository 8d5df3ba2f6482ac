"""Streams whose reader reads all, or would be misled by control characters; test_launchers.py has those who stall."""

import subprocess
import sys

import pytest
from commands import ROOT

from tprimat.cli.console import ESCAPES

PRINT = """
import sys
from tprimat.cli.console import run_as_script

def program():
    for number in range(5000):
        print(f"line {number}", "x" * 80, file=sys.stderr)

run_as_script(program)
"""


def test_a_reader_who_reads_gets_every_line():
    done = subprocess.run([sys.executable, "-c", PRINT], cwd=ROOT, check=False, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "".join(f"line {number} {'x' * 80}\n" for number in range(5000))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;32mgreen\x1b[0m\n", "green\n"),
        ("\r\x1b[2Kstep 1", "\r\x1b[2Kstep 1"),
        ("\x1b]0;title\x07a\x1b]52;c;AAAA\x1b\\b", "ab"),
        ("\x1b[2J\x1b[H\x1b[?1049hgone\x1b[6n", "gone"),
        ("\x1bcreset\x1b", "reset"),
        ("a\rb\r\nc", "ab\r\nc"),
        ("\x00\x07\x08\x9b31mx\x7f", "31mx"),
        ("tabs\tand ümläuts\n", "tabs\tand ümläuts\n"),
    ],
)
def test_only_text_and_our_own_line_reach_a_terminal(text, shown):
    assert ESCAPES.sub("", text) == shown


def test_ctrl_c_that_compiled_code_turned_into_an_error_of_its_own_is_no_traceback():
    text = """
import os, signal, sys
from tprimat.cli.console import run_as_script
def program():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt as stop:
        raise RuntimeError("cannot build a validator") from stop
sys.exit(run_as_script(program))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (130, "stopped\n")


@pytest.mark.parametrize(("name", "status"), [("INT", 130), ("TERM", 143), ("HUP", 129)])
def test_a_signal_leaves_no_temporary_file(name, status, tmp_path):
    text = f"""
import os, signal, sys, tempfile
from tprimat.cli.console import run_as_script
def program():
    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):
        os.kill(os.getpid(), signal.SIG{name})
        signal.pause()
sys.exit(run_as_script(program))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (status, "stopped\n")
    assert not list(tmp_path.iterdir())
