"""--parallel auto on two nodes: both run the same layouts and end alike. NVML shows two H200 on each; trainers are fake."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import FAKE_PACKAGES, fake_nvml, run_command

from tprimat.records.store import RunDirectory

NODE = str(Path(__file__).parent / "a_node.py")
ASKED = ("--nodes", "2", "--model", "llama", "--parallel", "auto")
HERE = {"FAKE_GPUS": "[{}, {}]", "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(FAKE_PACKAGES)}
FIRST, SECOND = "tp2_pp1_cp1_ep1", "tp1_pp1_cp1_ep1"
"""Layouts of 16 sequences on four H200, as they are predicted."""
FAST = ("pace", 0.02, "steps", 12)
FAILS = ("raise", "RuntimeError", "the cable is loose")


@pytest.fixture
def node(tmp_path, monkeypatch, cookie):
    """Start the launcher of a node, whose trainer does the words of its layout; its output folder is `out`."""
    del cookie  # ends what a test leaves behind
    for name in os.environ:
        if name.startswith(("SLURM_", "CUDA_", "NVIDIA_")):
            monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = []

    def start(rank, words, *flags, batch=16, cooldown=0):
        settings = ("--set", "benchmarking.meeting_timeout_seconds=20", "--set", f"benchmarking.cooldown_seconds={cooldown}")
        command = [sys.executable, NODE, *ASKED, "--global-batch-size", str(batch), "--output-dir", "out", *settings, *flags]
        given = {"MASTER_PORT": str(port), "NODE_RANK": str(rank), "FAKE_WORDS": json.dumps(words)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **HERE, **given}, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.stdout.close()


def ends(*processes):
    """Exit status and output of each launcher."""
    texts = [process.communicate(timeout=120)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


def runs(folder):
    """Record and folder of each run, in the order in which they ran."""
    found = [(RunDirectory(path).read_run(), path) for path in (folder / "out" / "runs").iterdir()]
    return sorted(found, key=lambda pair: pair[0].started_at)


def planned(batch):
    """The layout that this machine chooses for a batch."""
    with fake_nvml():
        done = run_command("benchmark.py", *ASKED, "--global-batch-size", batch, "--dry-run", "--json", environment=HERE)
    (plan,) = json.loads(done.stdout)["plans"]
    return plan["strategy"]


def test_a_layout_that_fails_on_one_node_stops_no_other(node, tmp_path, left_behind):
    words = {FIRST: FAST, SECOND: (*FAST, "sleep", 100)}
    launchers = node(0, words, "--parallel", "auto:2"), node(1, {**words, SECOND: FAILS}, "--parallel", "auto:2")
    (status, said), (other_status, other_said) = ends(*launchers)
    assert (status, other_status) == (1, 1), said + other_said
    made = [(record.strategy, record.outcome) for record, _ in runs(tmp_path)]
    assert made == [(one, "completed" if one == FIRST else "failed") for one in (FIRST, SECOND, SECOND, FIRST, FIRST, SECOND)]
    failed = next(record for record, _ in runs(tmp_path) if record.outcome == "failed")
    assert failed.cause == f"Node 1 ({socket.gethostname()}): RuntimeError: the cable is loose"
    assert not left_behind()
