"""Write runs for other tools: tables for notebooks, and the folders of experiment trackers, through their own libraries."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tprimat.analyze.groups import Measured
from tprimat.errors import ConfigError
from tprimat.records.redaction import redactor_of_this_machine
from tprimat.records.store import write_atomically
from tprimat.report.export import Row, as_json, comma_separated, results_of, rows_of, settings_of, step_values

EXPERIMENT = "tprimat"
RUN_TAG = "tprimat.run_id"


def export(runs: Sequence[Measured], to: str, path: Path) -> list[str]:
    """Write runs.

    A tracker's folder keeps what it holds; a run that is already in it is not added again.

    Args:
        runs: at least one.
        to: a key of TARGETS.
        path: a file for csv, json and parquet; a folder for the others.

    Returns:
        the names of the runs that were written.

    Raises:
        ConfigError: the library is not installed.
        RecordError: the path cannot be written.
    """
    redactor = redactor_of_this_machine()
    rows = [row | {"path": redactor.text(_from_here(str(row["path"])))} for row in rows_of(runs)]
    return TARGETS[to](runs, rows, path)


def _from_here(path: str) -> str:
    """Return a path below this folder without the folders above it."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def _csv(_: Sequence[Measured], rows: Sequence[Row], path: Path) -> list[str]:
    write_atomically(path, comma_separated(rows))
    return _names(rows)


def _json(_: Sequence[Measured], rows: Sequence[Row], path: Path) -> list[str]:
    write_atomically(path, as_json(rows))
    return _names(rows)


def _parquet(_: Sequence[Measured], rows: Sequence[Row], path: Path) -> list[str]:
    pyarrow = _library("pyarrow", "parquet", "pyarrow")
    parquet = _library("pyarrow.parquet", "parquet", "pyarrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return _names(rows)


def _tensorboard(runs: Sequence[Measured], rows: Sequence[Row], path: Path) -> list[str]:
    """Write a folder a run, with its steps and results as scalars."""
    summary = _library("tensorboard.summary", "tensorboard", "tensorboard")
    written = []
    for item, row in zip(runs, rows, strict=True):
        folder = path / item.result.run.run_id
        if any(folder.glob("events.out.tfevents.*")):
            continue
        writer = summary.Writer(str(folder))
        for step in item.result.steps:
            for name, value in step_values(step).items():
                writer.add_scalar(f"step/{name}", value, step.step)
        for name, value in results_of(row).items():
            writer.add_scalar(f"result/{name}", value, 0)
        writer.close()
        written.append(item.result.run.run_id)
    return written


def _mlflow(runs: Sequence[Measured], rows: Sequence[Row], path: Path) -> list[str]:
    """Write a run each into the experiment `tprimat` of mlflow.db: parameters, results and, step by step, metrics.

    MLflow no longer accepts folders without a database.
    """
    tracking = _library("mlflow.tracking", "mlflow", "mlflow")
    entities = _library("mlflow.entities", "mlflow", "mlflow")
    path.mkdir(parents=True, exist_ok=True)
    folder = path.resolve()
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    known = client.get_experiment_by_name(EXPERIMENT)
    experiment = known.experiment_id if known else client.create_experiment(EXPERIMENT, (folder / "artifacts").as_uri())
    written = []
    for item, row in zip(runs, rows, strict=True):
        run_id = item.result.run.run_id
        if client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run_id}'"):
            continue
        target = client.create_run(experiment, run_name=run_id, tags={RUN_TAG: run_id}).info.run_id
        points = [
            entities.Metric(f"step/{name}", value, int(1000 * (step.ended_at_seconds or 0)), step.step)
            for step in item.result.steps
            for name, value in step_values(step).items()
        ]
        points += [entities.Metric(name, value, 0, 0) for name, value in results_of(row).items()]
        parameters = [entities.Param(name, value[:MLFLOW_CHARACTERS]) for name, value in settings_of(row).items()]
        for begin in range(0, len(points), MLFLOW_METRICS):
            client.log_batch(target, metrics=points[begin : begin + MLFLOW_METRICS])
        for begin in range(0, len(parameters), MLFLOW_PARAMETERS):
            client.log_batch(target, params=parameters[begin : begin + MLFLOW_PARAMETERS])
        client.set_terminated(target, "FINISHED" if item.result.run.outcome == "completed" else "FAILED")
        written.append(run_id)
    return written


MLFLOW_METRICS, MLFLOW_PARAMETERS, MLFLOW_CHARACTERS = 1000, 100, 500
"""MLflow's limits: metrics and parameters of one batch, characters of a parameter."""


def _wandb(runs: Sequence[Measured], rows: Sequence[Row], path: Path) -> list[str]:
    """Write an offline run each, which `wandb sync` uploads."""
    wandb = _library("wandb", "wandb-offline", "wandb")
    path.mkdir(parents=True, exist_ok=True)
    written = []
    for item, row in zip(runs, rows, strict=True):
        run_id = item.result.run.run_id
        if any(path.glob(f"wandb/offline-run-*-{run_id}")):
            continue
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
        target = wandb.init(
            project=EXPERIMENT,
            id=run_id,
            name=run_id,
            dir=str(path),
            mode="offline",
            config=settings_of(row),
            settings=settings,
        )
        for step in item.result.steps:
            target.log(step_values(step), step=step.step)
        target.summary.update(results_of(row))
        target.finish(exit_code=0 if item.result.run.outcome == "completed" else 1)
        written.append(run_id)
    return written


def _names(rows: Sequence[Row]) -> list[str]:
    return [str(row["run_id"]) for row in rows]


def _library(module: str, target: str, package: str) -> Any:
    """Import a module of an optional library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"--to {target} needs {package}, which is not installed: pip install {package}") from error


TARGETS: Mapping[str, Callable[[Sequence[Measured], Sequence[Row], Path], list[str]]] = {
    "csv": _csv,
    "json": _json,
    "parquet": _parquet,
    "mlflow": _mlflow,
    "tensorboard": _tensorboard,
    "wandb-offline": _wandb,
}
"""Value of --to -> its writer."""
