"""tprimat export through libraries that TPrimat does not install.

NeMo's environment has all but MLflow, and `make test-nemo` runs these tests in it.

MLflow with its database is larger than all that TPrimat needs: it is tested where a user has it.
"""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, run_command

RUNS = Path(__file__).parents[1] / "runs" / "h100"
TRACKERS = {"mlflow": "sqlalchemy", "tensorboard": "tensorboard", "wandb-offline": "wandb"}
BEGAN = 1767225600.0
"""2026-01-01T00:00:00Z, when the runs of this folder started."""


def export(to, path, folder=RUNS):
    done = run_command("export", "--to", to, path, "--results-dir", folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs(tracker):
    pytest.importorskip(tracker.partition("-")[0])
    pytest.importorskip(TRACKERS[tracker])


def test_parquet_keeps_types_and_nulls(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    export("parquet", tmp_path / "runs.parquet")
    table = parquet.read_table(tmp_path / "runs.parquet")
    rows = {row["run_id"]: row for row in table.to_pylist()}
    assert table.num_rows == 6
    assert (rows["h100-llama-0"]["tensor_parallel"], rows["h100-llama-0"]["counted"]) == (1, True)
    assert rows["h100-llama-0"]["tokens_per_second_per_gpu"] == pytest.approx(7393.10, abs=0.01)
    assert rows["h100-qwen-oom"]["tokens_per_second_per_gpu"] is None


def test_parquet_files_are_one_table_whatever_their_runs_lack(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("cpu", "foreign", "h100"):
        export("parquet", tmp_path / f"{name}.parquet", RUNS.parent / name)
    first, *others = (parquet.read_schema(path) for path in sorted(tmp_path.iterdir()))
    assert not any(str(field.type) == "null" for field in first)
    assert all(
        first.field(name).type == other.field(name).type for other in others for name in set(first.names) & set(other.names)
    )


def test_parquet_that_cannot_be_written_is_one_line(tmp_path):
    pytest.importorskip("pyarrow.parquet")
    done = run_command("export", "--to", "parquet", tmp_path, "--results-dir", RUNS)
    assert (done.returncode, "the name of a file: this is a folder" in done.stderr) == (2, True)


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_below_a_file_is_one_line(tracker, tmp_path):
    needs(tracker)
    (tmp_path / "file").write_text("mine")
    done = run_command("export", "--to", tracker, tmp_path / "file", "--results-dir", RUNS)
    assert (done.returncode, "part of this path is a file" in done.stderr) == (2, True), done.stderr
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_run_is_left_out_until_it_has_an_end(tracker, tmp_path):
    needs(tracker)
    folder = tmp_path / "results" / "runs" / "h100-llama-0"
    shutil.copytree(RUNS / "runs" / "h100-llama-0", folder)
    ended = (folder / "run.json").read_text()
    (folder / "run.json").write_text(json.dumps(json.loads(ended) | {"outcome": "running", "ended_at": None}))
    assert "0 runs (1 left out, for lack of an end)" in export(tracker, tmp_path / "there", tmp_path / "results")
    (folder / "run.json").write_text(ended)
    assert "1 run\n" in export(tracker, tmp_path / "there", tmp_path / "results")


KILLED = """
import importlib, os, signal, sys
from tprimat.cli.main import start
module, owner, name = sys.argv[1:4]
place = getattr(importlib.import_module(module), owner)
method, calls = getattr(place, name), []
def dies(*words, **options):
    calls.append(1)
    if len(calls) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return method(*words, **options)
setattr(place, name, dies)
start("export", "tprimat export", sys.argv[4:])
"""
"""An export that is killed in its twentieth call of a library."""


@pytest.mark.parametrize(
    ("tracker", "place"),
    [
        ("mlflow", ("mlflow.tracking", "MlflowClient", "log_batch")),
        ("tensorboard", ("tensorboard.summary", "Writer", "add_scalar")),
        ("wandb-offline", ("wandb.sdk.wandb_run", "Run", "log")),
    ],
)
def test_a_run_whose_export_was_killed_is_written_again_as_a_whole(tracker, place, tmp_path):
    needs(tracker)
    many = tmp_path / "results"  # MLflow takes a run in two calls
    for number in range(10):
        folder = many / "runs" / f"run-{number}"
        shutil.copytree(RUNS / "runs" / "h100-llama-0", folder)
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(record | {"run_id": folder.name}))
    words = ["--to", tracker, str(tmp_path / "there"), "--results-dir", str(many)]
    done = subprocess.run([sys.executable, "-c", KILLED, *place, *words], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    there = 9 if tracker == "mlflow" else 0
    besides = f" ({there} were there already)" if there else ""
    assert f"{10 - there} run{'s' * (there < 9)}{besides}\n" in export(tracker, tmp_path / "there", many)
    assert not (tmp_path / "there" / ".unfinished").exists()


PLACES = """
import socket, sys
from tprimat.cli.main import start
def refused(host, *others, **options):
    print("CALLED", host, file=sys.stderr)
    raise OSError(f"no way to {host}")
socket.getaddrinfo = refused
sys.exit(start("export", "tprimat export", sys.argv[1:]))
"""
VARIABLES = ("CI", "DO_NOT_TRACK", "PYTEST_CURRENT_TEST", "MLFLOW_DISABLE_TELEMETRY", "WANDB_ERROR_REPORTING")
"""Of a user or a continuous integration, where the libraries are silent anyway."""


@pytest.mark.parametrize("tracker", ["mlflow", "wandb-offline"])
def test_an_export_calls_nobody(tracker, tmp_path, monkeypatch):
    needs(tracker)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    words = [sys.executable, "-c", PLACES, "--to", tracker, tmp_path, "--results-dir", RUNS]
    done = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "CALLED" in line and "127.0.0.1" not in line]) == (
        0,
        [],
    )


def test_tensorboard_draws_the_steps_of_each_run(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert "6 runs\n" in export("tensorboard", tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "h100-llama-0"), size_guidance={"tensors": 0})
    events.Reload()
    tags = events.Tags()["tensors"]
    assert {"step/step_seconds", "step/loss", "result/mfu", "result/tokens_per_second_per_gpu"} <= set(tags)
    assert [event.step for event in events.Tensors("step/loss")] == list(range(1, 41))
    assert events.Tensors("step/loss")[0].wall_time == pytest.approx(BEGAN + 26.486646)
    assert "0 runs (6 were there already)" in export("tensorboard", tmp_path)


def test_wandb_writes_runs_that_can_be_uploaded_later(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "6 runs\n" in export("wandb-offline", tmp_path)
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-h100-*.wandb"))) == 6
    assert "0 runs (6 were there already)" in export("wandb-offline", tmp_path)


def test_mlflow_has_parameters_results_and_curves(tmp_path):
    tracking = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")
    assert "6 runs\n" in export("mlflow", tmp_path)
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs(["1"], "tags.`tprimat.run_id` = 'h100-llama-0'")
    assert run.data.params["strategy"] == "minimal_communication"
    assert run.data.metrics["tokens_per_second_per_gpu"] == pytest.approx(7393.10, abs=0.01)
    losses = client.get_metric_history(run.info.run_id, "step/loss")
    assert (len(losses), losses[0].timestamp, run.info.start_time) == (40, 1000 * BEGAN + 26487, 1000 * BEGAN)
    (failed,) = client.search_runs(["1"], "tags.`tprimat.run_id` = 'h100-qwen-oom'")
    assert (failed.info.status, failed.info.end_time) == ("FAILED", 1000 * BEGAN)
    assert "0 runs (6 were there already)" in export("mlflow", tmp_path)


def test_a_database_that_is_none_is_one_line(tmp_path):
    needs("mlflow")
    (tmp_path / "mlflow.db").write_text("no database, but a text that is longer than the header of one would be" * 10)
    done = run_command("export", "--to", "mlflow", tmp_path, "--results-dir", RUNS)
    assert done.returncode == 2
    assert f"error: MLflow cannot write {tmp_path}/mlflow.db: " in done.stderr
    assert "file is not a database" in done.stderr
