"""Streams whose reader stalls, leaves, or would be misled by control characters."""

import os
import re
import subprocess
import sys
import time

import pytest
from commands import ROOT

from tprimat.report.console import ESCAPES

PRINT = """
import sys, time
from tprimat.report.console import run_as_script

def program():
    for number in range(int(sys.argv[1])):
        print(f"line {number}", "x" * 80, file=sys.stderr)
    print("the result", "y" * 300_000)
    open(sys.argv[2], "x").close()
    return int(sys.argv[3])

sys.exit(run_as_script(program))
"""


def printing(tmp_path, count, status=0):
    """A program with an unread pipe, which says by a file that it got to its end; and the other end of the pipe."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", PRINT, str(count), str(tmp_path / "done"), str(status)]
    process = subprocess.Popen(command, stdout=writing, stderr=writing)
    os.close(writing)
    ends = time.monotonic() + 60
    while not (tmp_path / "done").exists():
        assert time.monotonic() < ends, "printing waits for its reader"
        time.sleep(0.01)
    return process, reading


def read_all(descriptor):
    with os.fdopen(descriptor, encoding="utf8") as file:
        return file.read()


def test_a_program_passes_a_reader_who_stalls_and_says_how_much_of_its_progress_is_missing(tmp_path):
    process, reading = printing(tmp_path, 20_000)
    assert process.poll() is None, "the result waits for the reader"
    text = read_all(reading)
    assert process.wait(60) == 0
    shown = len(re.findall(r"^line \d+ x+$", text, re.MULTILINE))
    missing = re.findall(r"^\(([\d,]+) lines are missing here: nobody read them in time\)$", text, re.MULTILINE)
    assert shown + sum(int(count.replace(",", "")) for count in missing) == 20_000
    assert "the result " + "y" * 300_000 + "\n" in text


def test_a_reader_who_reads_gets_every_line(tmp_path):
    command = [sys.executable, "-c", PRINT, "5000", str(tmp_path / "done"), "0"]
    shown = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True).stderr
    assert shown == "".join(f"line {number} {'x' * 80}\n" for number in range(5000))


def test_a_program_that_a_signal_ends_does_not_wait_for_a_reader_who_stalls(tmp_path):
    process, reading = printing(tmp_path, 20_000, status=143)
    assert process.wait(60) == 143
    os.close(reading)


def test_ctrl_c_ends_a_program_that_waits_for_its_reader(tmp_path):
    process, reading = printing(tmp_path, 20_000)
    process.send_signal(2)
    assert process.wait(60) == 130
    os.close(reading)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[1;32mgreen\x1b[0m\n", "\x1b[1;32mgreen\x1b[0m\n"),
        ("\r\x1b[2Kstep 1", "\r\x1b[2Kstep 1"),
        ("\x1b]0;title\x07a\x1b]52;c;AAAA\x1b\\b", "ab"),
        ("\x1b[2J\x1b[H\x1b[?1049hgone\x1b[6n", "gone"),
        ("\x1bcreset\x1b", "reset"),
        ("a\rb\r\nc", "ab\r\nc"),
        ("\x00\x07\x08\x9b31mx\x7f", "31mx"),
        ("tabs\tand ümläuts\n", "tabs\tand ümläuts\n"),
    ],
)
def test_only_colours_and_our_own_line_reach_a_terminal(text, shown):
    assert ESCAPES.sub("", text) == shown


def test_ctrl_c_that_compiled_code_turned_into_an_error_of_its_own_is_no_traceback():
    text = """
import os, signal, sys
from tprimat.report.console import run_as_script
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
from tprimat.report.console import run_as_script
def program():
    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):
        os.kill(os.getpid(), signal.SIG{name})
        signal.pause()
sys.exit(run_as_script(program))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (status, "stopped\n")
    assert not list(tmp_path.iterdir())
