import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest

from tprimat.core.errors import LaunchError
from tprimat.records import lock
from tprimat.records.lock import LOCK_FILE, SILENT_SECONDS, holder_of, locked
from tprimat.records.store import to_json

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


def left_by(folder, seconds_ago=0.0, **fields):
    """A lock file without its launcher, which has ended unless the fields say more."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    (folder / LOCK_FILE).write_text(to_json(dataclasses.replace(lock._myself(), pid=ended.pid, **fields)))
    then = time.time() - seconds_ago
    os.utime(folder / LOCK_FILE, (then, then))


def test_the_second_one_is_refused_with_who_holds_the_folder_and_the_way_out(tmp_path):
    process = another(tmp_path)
    with pytest.raises(LaunchError) as refused, locked(tmp_path):
        pass
    assert refused.value.what == f"The output folder {tmp_path} is in use."
    assert f"Process {process.pid} on this machine" in refused.value.why
    assert "--output-dir" in refused.value.fix
    assert holder_of(tmp_path).pid == process.pid
    process.communicate("\n")
    assert process.returncode == 0
    assert not (tmp_path / LOCK_FILE).exists()
    with locked(tmp_path):
        assert holder_of(tmp_path).pid == os.getpid()


def test_the_lock_of_a_launcher_that_was_killed_is_taken_over(tmp_path):
    process = another(tmp_path)
    process.kill()
    process.wait()
    assert (tmp_path / LOCK_FILE).exists()
    assert holder_of(tmp_path) is None
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


ELSEWHERE = {"boot": "other", "host": "gpu07"}
LEFT = (
    ({}, True),
    ({"boot": "before"}, True),
    (ELSEWHERE, False),
    ({**ELSEWHERE, "seconds_ago": SILENT_SECONDS - 60}, False),
    ({**ELSEWHERE, "seconds_ago": SILENT_SECONDS + 60}, True),
    ({**ELSEWHERE, "seconds_ago": -86_400}, False),  # its clock is a day ahead
)


@pytest.mark.parametrize("flock", [True, False])
def test_a_lock_without_a_process_here_is_stale_or_belongs_elsewhere(flock, tmp_path, monkeypatch):
    if not flock:
        monkeypatch.setattr(lock, "_lock", lambda file: None)
    for fields, free in (*LEFT, *(() if flock else [({"namespace": "pid:[1]"}, False)])):
        left_by(tmp_path, **fields)
        assert (holder_of(tmp_path) is None) == free, fields
        if free:
            with locked(tmp_path):
                pass
            continue
        with pytest.raises(LaunchError) as refused, locked(tmp_path):
            pass
        assert fields.get("host", "this machine") in refused.value.why
        assert (f"remove {tmp_path / LOCK_FILE}" in refused.value.fix) == ("host" in fields)  # whose clock may be years ahead


def test_a_lock_file_that_names_nobody_is_taken(tmp_path):
    for text in ("", "{", '{"pid": "x"}', "\0" * 9000):
        (tmp_path / LOCK_FILE).write_text(text)
        assert holder_of(tmp_path) is None
        with locked(tmp_path):
            assert holder_of(tmp_path) is not None


def test_what_the_holder_starts_is_let_in_and_leaves_the_lock_to_it(tmp_path):
    with locked(tmp_path):
        process = another(tmp_path)
        process.communicate("\n")
        with locked(tmp_path):
            pass
        assert holder_of(tmp_path).pid == os.getpid()


def test_a_folder_that_was_moved_keeps_the_lock_of_the_one_in_its_place(tmp_path):
    folder = tmp_path / "out"
    with locked(folder):
        folder.rename(tmp_path / "moved")
        process = another(folder)
    assert holder_of(folder).pid == process.pid
    process.communicate("\n")


def test_the_holder_shows_other_machines_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    with locked(tmp_path):
        os.utime(tmp_path / LOCK_FILE, (0, 0))
        ends = time.monotonic() + 60
        while not (tmp_path / LOCK_FILE).stat().st_mtime:
            assert time.monotonic() < ends
            time.sleep(0.01)


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


def test_a_requeued_job_takes_over_what_its_earlier_start_held_on_another_machine(tmp_path):
    start, again = ("slurm 7", 0), ("slurm 7", 1)
    for held, job in ((again, again), (start, ("slurm 8", 1)), (start, None), (None, again)):
        left_by(tmp_path, **ELSEWHERE, job=held)
        with pytest.raises(LaunchError), locked(tmp_path, job):
            pass
    left_by(tmp_path, **ELSEWHERE, job=start)
    with locked(tmp_path, again):
        assert holder_of(tmp_path).job == again
