"""Aligned columns, and how they fit a terminal."""

import fcntl
import os
import pty
import struct
import sys
import termios

import pytest

from tprimat.report.tables import PLAIN, Screen, columns, screen_of


def test_names_stand_left_and_numbers_right():
    assert columns(["model", "n"], [["a", "10"], ["longer", "7"]]).splitlines() == [
        "model    n",
        "------  --",
        "a       10",
        "longer   7",
    ]


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="argument"):
        columns(["model", "n"], [["a"]])


HEADER = ["configuration", "runs", "rate", "memory"]
ROWS = [["a name of several words that is long", "3", "12,345 [12,300, 12,390]", "103.1 GiB"], ["short", "1", "1", "2 GiB"]]


def test_columns_drop_out_in_the_order_given_until_the_table_fits():
    lines = columns(HEADER, ROWS, screen=Screen(width=65), drop=("memory", "runs")).splitlines()
    assert lines[0].split() == ["configuration", "runs", "rate"]
    assert lines[-1] == "not shown here: memory"
    narrow = columns(HEADER, ROWS, screen=Screen(width=55), drop=("memory", "runs"))
    assert narrow.splitlines()[-1] == "not shown here: runs, memory"
    assert max(map(len, narrow.splitlines())) <= 55


def test_three_names_in_a_row_leave_room_for_a_number():
    cells = ["8 processes (Intel(R) Xeon(R) Processor)", "qwen tiny", "minimal_communication TP1 PP1 DP8", "150 [133, 170]", "18"]
    shown = columns(["platform", "model", "configuration", "tokens/s", "n"], [cells], left=3, screen=Screen(width=80), drop=["n"])
    assert "150 [133, 170]" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_names_break_between_words_and_numbers_never():
    lines = columns(HEADER[::2], [row[::2] for row in ROWS], screen=Screen(width=54)).splitlines()
    assert "12,345 [12,300, 12,390]" in lines[2]
    assert lines[2].startswith("a name of several words that")
    assert lines[3] == "is long"


def test_a_pipe_gets_one_line_for_each_row():
    figures = [letter * 90 for letter in "abcd"]
    assert len(columns(["name", *figures], [["a name of several words " * 9, "1", "2", "3", "4"]]).splitlines()) == 3


def test_a_terminal_is_asked_how_wide_it_is_and_a_pipe_gets_every_column(capsys, monkeypatch):
    """A narrow terminal counts as one of 80 columns."""
    assert screen_of(sys.stdout) == PLAIN
    monkeypatch.delenv("COLUMNS", raising=False)
    leader, follower = pty.openpty()
    with os.fdopen(leader), os.fdopen(follower, "w") as terminal:
        for columns_there, width in ((100, 100), (40, 80)):
            fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns_there, 0, 0))
            assert screen_of(terminal) == Screen(width=width)
