"""tprimat export through libraries that TPrimat does not install; `make test-nemo` runs these tests where they are."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, run_command

RUNS = Path(__file__).parents[1] / "runs" / "h100"


def export(to, path, folder=RUNS):
    done = run_command("export", "--to", to, path, "--results-dir", folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wandb_writes_runs_once_when_they_have_an_end_and_not_over_a_file(tmp_path):
    pytest.importorskip("wandb")
    (tmp_path / "file").write_text("mine")
    done = run_command("export", "--to", "wandb-offline", tmp_path / "file", "--results-dir", RUNS)
    assert (done.returncode, "cannot be written" in done.stderr) == (2, True), done.stderr
    assert (tmp_path / "file").read_text() == "mine"
    shutil.copytree(RUNS, tmp_path / "results")
    record = tmp_path / "results" / "runs" / "h100-llama-0" / "run.json"
    ended = record.read_text()
    record.write_text(json.dumps(json.loads(ended) | {"outcome": "running", "ended_at": None}))
    assert "5 runs of 6" in export("wandb-offline", tmp_path / "there", tmp_path / "results")
    record.write_text(ended)
    assert "1 run of 6" in export("wandb-offline", tmp_path / "there", tmp_path / "results")
    assert len(list(tmp_path.glob("there/wandb/offline-run-*/run-h100-*.wandb"))) == 6


PLACES = """
import socket, sys
from tprimat.cli.main import start
def refused(host, *others, **options):
    print("CALLED", host, file=sys.stderr)
    raise OSError(f"no way to {host}")
socket.getaddrinfo = refused
sys.exit(start("export", "tprimat export", sys.argv[1:]))
"""


def test_an_export_calls_nobody(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("CI", "DO_NOT_TRACK", "PYTEST_CURRENT_TEST", "WANDB_ERROR_REPORTING"):  # under which W&B is silent anyway
        monkeypatch.delenv(name, raising=False)
    words = [sys.executable, "-c", PLACES, "--to", "wandb-offline", tmp_path, "--results-dir", RUNS]
    done = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, check=False)
    called = [line for line in done.stderr.splitlines() if "CALLED" in line and "127.0.0.1" not in line]
    assert (done.returncode, called) == (0, [])
