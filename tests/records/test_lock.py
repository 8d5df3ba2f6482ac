import os
import subprocess
import sys

import pytest

from tprimat.core.errors import LaunchError
from tprimat.records.lock import LOCK_FILE, holder_of, locked

TAKE = """
import pathlib, sys
from tprimat.records.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("taken", flush=True)
    sys.stdin.readline()
"""


def another(folder, *prefix):
    """A process that holds the folder until it is killed or gets a line."""
    command = [*prefix, sys.executable, "-c", TAKE, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "taken\n"
    return process


def test_the_second_one_is_refused_with_who_holds_the_folder_and_the_way_out(tmp_path):
    process = another(tmp_path)
    with pytest.raises(LaunchError) as refused, locked(tmp_path):
        pass
    assert refused.value.what == f"The output folder {tmp_path} is in use."
    assert f"process {process.pid} on this machine since" in refused.value.why
    assert "--output-dir" in refused.value.fix
    assert holder_of(tmp_path).startswith(f"process {process.pid} on this machine since ")
    process.communicate("\n")
    assert process.returncode == 0
    assert holder_of(tmp_path) is None
    with locked(tmp_path):
        assert holder_of(tmp_path).startswith(f"process {os.getpid()} ")


def test_the_lock_of_a_launcher_that_was_killed_is_taken_over(tmp_path):
    process = another(tmp_path)
    process.kill()
    process.wait()
    assert (tmp_path / LOCK_FILE).exists()
    assert holder_of(tmp_path) is None
    with locked(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} ")


def test_a_lock_file_that_names_nobody_is_taken(tmp_path):
    for text in ("", "{", '{"pid": "x"}', "\0" * 9000):
        (tmp_path / LOCK_FILE).write_text(text)
        with locked(tmp_path):
            assert holder_of(tmp_path).startswith(f"process {os.getpid()} on this machine since ")


def test_what_the_holder_starts_is_let_in_and_leaves_the_lock_to_it(tmp_path):
    with locked(tmp_path):
        process = another(tmp_path)
        process.communicate("\n")
        with locked(tmp_path):
            pass
        assert holder_of(tmp_path).startswith(f"process {os.getpid()} ")


CONTEND = """
import pathlib, sys
from tprimat.core.errors import LaunchError
from tprimat.records.lock import locked
folder = pathlib.Path(sys.argv[1])
for _ in range(200):
    try:
        with locked(folder):
            (folder / "one").open("x").close()
            (folder / "one").unlink()
            print("got it")
    except LaunchError:
        pass
"""


def test_of_many_at_once_one_gets_the_folder_at_any_time(tmp_path):
    crowd = [subprocess.Popen([sys.executable, "-c", CONTEND, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(4)]
    got = [process.communicate()[0].count(b"got it") for process in crowd]
    assert [process.returncode for process in crowd] == [0] * 4
    assert sum(got) > 0
