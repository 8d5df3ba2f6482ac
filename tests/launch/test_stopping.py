import json
import os
import signal
import subprocess
import sys

import pytest
from a_launch import ROOT, TRAINER, Notes, a_launch, leftovers, wait_for

from tprimat.engines.base import Command
from tprimat.hardware.nodes import Nodes
from tprimat.launch.process import torchrun
from tprimat.launch.run import run
from tprimat.records.store import RunDirectory


def test_a_signal_to_the_launcher_stops_the_run_with_all_its_descendants_and_keeps_what_was_measured(
    launcher, left_behind, tmp_path
):
    process = launcher("spawn", "detached", "spawn", "child", "steps", 2, "sleep", 100)
    wait_for(lambda: len(left_behind()) >= 5)  # launcher, reaper, trainer and its two descendants
    wait_for(lambda: len(RunDirectory(tmp_path).read_steps()) == 2)
    process.terminate()
    assert json.loads(process.communicate()[0]) == ["interrupted", "Stopped by SIGTERM.", -signal.SIGTERM, 2]
    assert json.loads((tmp_path / "run.json").read_text())["outcome"] == "interrupted"
    assert not left_behind()


def test_a_second_interrupt_kills_at_once(launcher, left_behind, tmp_path):
    stopped = tmp_path / "stopped"
    process = launcher("note", "SIGTERM", stopped, "steps", 1, "sleep", 1000, grace=1000)
    process.send_signal(signal.SIGINT)
    wait_for(stopped.exists)
    process.send_signal(signal.SIGINT)
    assert json.loads(process.communicate()[0]) == ["interrupted", "Stopped by SIGINT.", -signal.SIGKILL, 1]
    assert not left_behind()


def test_killing_the_launcher_ends_the_run(launcher, left_behind):
    process = launcher("ignore", "SIGTERM", "spawn", "detached", "steps", 1, "sleep", 1000, grace=0.5)
    process.kill()
    process.communicate()
    wait_for(lambda: not left_behind())


def test_whoever_outlives_a_completed_run_is_ended_without_waiting_for_the_grace(tmp_path, left_behind):
    record, _ = run(a_launch(tmp_path, "spawn", "detached", "spawn", "child", "steps", 1, grace_seconds=1000.0), Notes())
    assert record.outcome == "completed"
    assert not left_behind()


ENDS_ITS_MAIN_THREAD = """
import ctypes, os, pathlib, signal, sys, threading, time

def end(*_):
    threading.Thread(target=time.sleep, args=(0.5,)).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)

signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1]).touch()
time.sleep(100)
"""


def test_a_process_whose_main_thread_ends_first_has_not_ended(launcher_of, tmp_path):
    ready = tmp_path / "ready"
    process = launcher_of([sys.executable, "-c", ENDS_ITS_MAIN_THREAD, ready])
    wait_for(ready.exists)
    process.terminate()
    assert json.loads(process.communicate()[0]) == ["interrupted", "Stopped by SIGTERM.", 0, 0]


def test_a_hangup_that_nohup_ignores_stays_ignored(tmp_path):
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        notes = Notes()
        notes.on_step = lambda step: os.kill(os.getpid(), signal.SIGHUP)
        record, _ = run(a_launch(tmp_path, "steps", 1), notes)
    finally:
        signal.signal(signal.SIGHUP, former)
    assert record.outcome == "completed"


def test_ranks_that_torchrun_put_into_sessions_of_their_own_are_stopped(launcher_of, left_behind, tmp_path):
    argv = [*torchrun(Nodes(), 2), TRAINER[-1], "ignore", "SIGTERM", "steps", "1", "sleep", "100"]
    process = launcher_of(argv)
    wait_for(lambda: len(RunDirectory(tmp_path).read_steps()) == 2)
    process.terminate()
    assert json.loads(process.communicate()[0])[0] == "interrupted"
    assert not left_behind()
    assert not leftovers()


def test_a_rank_that_is_killed_is_told_by_torchruns_block(tmp_path, left_behind):
    plain = a_launch(tmp_path)
    argv = (*torchrun(Nodes(), 2), TRAINER[-1], "steps", "1", "kill", "SIGKILL")
    command = Command(argv=argv, environment=plain.command.environment)
    record, _ = run(a_launch(tmp_path, command=command), Notes())
    assert (record.outcome, record.exit_code) == ("failed", 1)
    assert "killed with SIGKILL" in record.cause
    assert not left_behind()


UNKILLABLE = """
import time
from tprimat.launch import process_tree
process_tree.SIGKILL_TIMEOUT_SECONDS = 0.3
shutdown = process_tree.Shutdown("no such marker", lambda: 1, 0.1)
while not shutdown.advance():
    time.sleep(0.05)
print("given up")
"""


@pytest.mark.skipif(subprocess.run(["unshare", "-Urpf", "true"], check=False).returncode != 0, reason="needs a PID namespace")
def test_a_process_that_sigkill_does_not_end_is_given_up():
    # The first process of a PID namespace is immune to signals from within.
    inside = ["unshare", "-Urpf", "--mount-proc", "sh", "-c", '"$0" -c "$1"; true', sys.executable, UNKILLABLE]
    done = subprocess.run(inside, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "given up\n"
