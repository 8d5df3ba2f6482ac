"""Write runs for other tools: tables for notebooks, and the folders of experiment trackers, through their own libraries."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tprimat.analyze.groups import Measured
from tprimat.core.errors import ConfigError
from tprimat.records.redaction import PATH, redactor_of_this_machine
from tprimat.records.schema import StepRecord
from tprimat.records.store import cannot_write, write_atomically
from tprimat.report.export import KINDS, Row, as_json, comma_separated, results_of, rows_of, settings_of, step_values

PROJECT = "tprimat"
UNFINISHED = ".unfinished"
"""Folder of what is being written: a run whose export was killed is written again, not taken for one that is there."""
SILENT = {"DO_NOT_TRACK": "true", "WANDB_ERROR_REPORTING": "false"}
"""Variables that keep W&B from calling its makers: an export leaves this machine only where the user takes it."""


def export(runs: Sequence[Measured], to: str, path: Path, folders: Sequence[Path]) -> list[str]:
    """Write runs, one at least, to a file (csv, json, parquet) or the folder of a tracker; `to` is a key of TARGETS.

    A tracker's folder keeps what it holds; a run that is already in it is not added again. So one without an end is left out.
    The runs were looked for in `folders`.

    Returns:
        the names of the runs that were written.

    Raises:
        ConfigError: the library is not installed.
        RecordError: the path cannot be written, or holds something else.
    """
    places = places_of([Path(str(row["path"])) for row in rows_of(runs)], folders)
    rows = [row | {"path": place} for row, place in zip(rows_of(runs), places, strict=True)]
    try:
        return TARGETS[to](runs, rows, path)
    except OSError as error:
        raise cannot_write(path, error) from error


def places_of(paths: Sequence[Path], folders: Sequence[Path]) -> list[str]:
    """Return paths without private names: from this folder on, from the home on, else from the given folder that holds them.

    Where several given folders have the same name, a number tells them apart.
    """
    redactor = redactor_of_this_machine()
    for path in paths:
        redactor.learn(str(path))
    outside = list(dict.fromkeys(folder for folder in folders if redactor.text(str(folder)).startswith(PATH)))
    found = []
    for path in paths:
        shown = redactor.text(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))
        above = [folder for folder in outside if path.is_relative_to(folder)]
        if shown.startswith(PATH) and above:
            folder = max(above, key=lambda one: len(one.parts))
            alike = [one for one in outside if one.name == folder.name]
            mark = PATH if len(alike) == 1 else f"{PATH[:-1]} {alike.index(folder) + 1}]"
            shown = redactor.text(str(Path(mark, folder.name, path.relative_to(folder))))
        found.append(shown)
    return found


def _text(form: Callable[[Sequence[Row]], str], _: Sequence[Measured], rows: Sequence[Row], path: Path) -> list[str]:
    write_atomically(path, form(rows))
    return _names(rows)


def _parquet(_: Sequence[Measured], rows: Sequence[Row], path: Path) -> list[str]:
    """Write columns of the same types into every file, so that several can be read as one, whatever their runs lack."""
    pyarrow = _library("pyarrow", "parquet", "pyarrow")
    parquet = _library("pyarrow.parquet", "parquet", "pyarrow")
    types = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
    schema = pyarrow.schema([(name, types[KINDS.get(name, str)]) for name in rows[0]])
    content = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), content)
    write_atomically(path, content.getvalue().to_pybytes())
    return _names(rows)


def _wandb(runs: Sequence[Measured], rows: Sequence[Row], path: Path) -> list[str]:
    """Write an offline run each, which `wandb sync` uploads."""
    wandb = _library("wandb", "wandb-offline", "wandb")
    written = []
    for item, row in _ended(runs, rows):
        run_id = item.result.run.run_id
        if any(path.glob(f"wandb/offline-run-*-{run_id}")):
            continue
        with _whole(path) as folder:
            target = wandb.init(
                project=PROJECT,
                id=run_id,
                name=run_id,
                dir=str(folder),
                mode="offline",
                config=settings_of(row),
                settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True),
            )
            for step in item.result.steps:
                ended = _end_of(step, item)
                target.log(step_values(step) | ({} if ended is None else {"_timestamp": ended}), step=step.step)
            target.summary.update(results_of(row))
            target.finish(exit_code=0 if item.result.run.outcome == "completed" else 1)
            (path / "wandb").mkdir(exist_ok=True)
            for done in folder.glob("wandb/offline-run-*"):
                done.replace(path / "wandb" / done.name)
        written.append(run_id)
    return written


def _ended(runs: Sequence[Measured], rows: Sequence[Row]) -> Iterator[tuple[Measured, Row]]:
    """Yield the runs that have ended, with their rows."""
    return ((item, row) for item, row in zip(runs, rows, strict=True) if item.result.run.outcome != "running")


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield an empty folder below `path` for one run, which is moved from there when all of it is written."""
    folder = path / UNFINISHED
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _moment(text: str | None) -> float | None:
    """Return the Unix time in seconds of a record's time; None where it has none."""
    try:
        return None if text is None else datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def _end_of(step: StepRecord, item: Measured) -> float | None:
    """Return the Unix time in seconds at which a step ended, None where the run's log has no times: now, for a tracker."""
    began = _moment(item.result.run.started_at)
    return None if began is None or step.ended_at_seconds is None else began + step.ended_at_seconds


def _names(rows: Sequence[Row]) -> list[str]:
    return [str(row["run_id"]) for row in rows]


def _library(module: str, target: str, package: str) -> Any:
    """Import a module of an optional library, which then tells its makers nothing."""
    os.environ.update(SILENT)
    try:
        return import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        raise ConfigError(f"--to {target} needs {missing}, which is not installed: pip install {package}") from error


TARGETS: Mapping[str, Callable[[Sequence[Measured], Sequence[Row], Path], list[str]]] = {
    "csv": partial(_text, comma_separated),
    "json": partial(_text, as_json),
    "parquet": _parquet,
    "wandb-offline": _wandb,
}
"""Value of --to -> its writer."""
