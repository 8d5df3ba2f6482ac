"""tprimat export through libraries that TPrimat does not install.

NeMo's environment has all but MLflow, and `make test-nemo` runs these tests in it.

MLflow with its database is larger than all that TPrimat needs: it is tested where a user has it.
"""

from pathlib import Path

import pytest
from commands import run_command

RUNS = Path(__file__).parents[1] / "runs" / "h100"


def export(to, path):
    done = run_command("export", "--to", to, path, "--results-dir", RUNS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_parquet_keeps_types_and_nulls(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    export("parquet", tmp_path / "runs.parquet")
    table = parquet.read_table(tmp_path / "runs.parquet")
    rows = {row["run_id"]: row for row in table.to_pylist()}
    assert table.num_rows == 6
    assert (rows["h100-llama-0"]["tensor_parallel"], rows["h100-llama-0"]["counted"]) == (1, True)
    assert rows["h100-llama-0"]["tokens_per_second_per_gpu"] == pytest.approx(7393.10, abs=0.01)
    assert rows["h100-qwen-oom"]["tokens_per_second_per_gpu"] is None


def test_tensorboard_draws_the_steps_of_each_run(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert "6 runs\n" in export("tensorboard", tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "h100-llama-0"), size_guidance={"tensors": 0})
    events.Reload()
    tags = events.Tags()["tensors"]
    assert {"step/step_seconds", "step/loss", "result/mfu", "result/tokens_per_second_per_gpu"} <= set(tags)
    assert [event.step for event in events.Tensors("step/loss")] == list(range(1, 41))
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
    assert len(client.get_metric_history(run.info.run_id, "step/loss")) == 40
    assert "0 runs (6 were there already)" in export("mlflow", tmp_path)
