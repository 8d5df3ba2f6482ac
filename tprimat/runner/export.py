"""Write runs for others: archives, tables for notebooks, and folders of W&B, through the libraries of these formats."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tprimat.analyze.groups import Measured
from tprimat.core.errors import ConfigError
from tprimat.records.benchmark_file import benchmark_text
from tprimat.records.discover import is_result_file
from tprimat.records.schema import ProbeRecord
from tprimat.records.sharing import shareable
from tprimat.records.store import as_document, cannot_write, to_json, write_atomically
from tprimat.report.export import Row, as_json, comma_separated, results_of, rows_of, settings_of, step_values

PROJECT = "tprimat"
SILENT = {"DO_NOT_TRACK": "true", "WANDB_ERROR_REPORTING": "false"}
"""Variables that keep W&B from calling its makers: an export leaves this machine only where the user takes it."""


def export(runs: Sequence[Measured], to: str, path: Path, folders: Sequence[Path]) -> list[str]:
    """Write runs, one at least, to a file (csv, json) or the folder of a tracker; `to` is a key of TARGETS.

    A tracker's folder keeps what it holds; a run that is already in it is not added again. So one without an end is left out.
    The runs were looked for in `folders`.

    Returns:
        the names of the runs that were written.

    Raises:
        ConfigError: the library is not installed.
        RecordError: the path cannot be written, or holds something else.
    """
    rows = [row | {"path": place} for row, place in zip(rows_of(runs), places_of(runs, folders), strict=True)]
    try:
        return TARGETS[to](runs, rows, path)
    except OSError as error:
        raise cannot_write(path, error) from error


def places_of(runs: Sequence[Measured], folders: Sequence[Path]) -> list[str]:
    """Return the path of each run from the given folder or file on that holds it; a number tells folders of one name apart."""
    names: dict[Path, str] = {}
    for folder in (place.parent if place.name == "run.json" else place for place in folders):
        root = folder.resolve().name.removesuffix(".gz").removesuffix(".tar") or "results"
        numbered = (root, *(f"{root}-{number}" for number in range(2, len(folders) + 1)))
        names.setdefault(folder, next((name for name in numbered if name not in names.values()), root))
    above = [max((one for one in names if item.result.path.is_relative_to(one)), key=lambda one: len(one.parts)) for item in runs]
    places = [Path(names[one], item.result.path.relative_to(one)) for item, one in zip(runs, above, strict=True)]
    return [os.fsencode(place).decode("utf8", "backslashreplace") for place in places]


def packed(runs: Sequence[Measured], probes: Sequence[ProbeRecord], folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield the files of an archive of some runs, which were read to be shared: a folder a run, or its benchmark file."""
    if probes:
        lines = (json.dumps(shareable(as_document(probe))) for probe in probes)
        yield "probes.jsonl", "".join(f"{line}\n" for line in lines)
    for place, item in sorted(zip(places_of(runs, folders), runs, strict=True), key=lambda pair: pair[0]):
        result, run = item.result, item.result.run
        if result.path.is_file() or result.path.suffix == ".json":
            if item.not_counted and run.counts:  # the file contradicts itself, and is written anew from its records
                run = replace(run, mismatches=(item.not_counted,))
            folder, _, name = place.rpartition("/")
            name = name if is_result_file(name) else f"benchmark_{name}.json"
            yield f"{folder or 'results'}/{name}", benchmark_text(run, result.steps, item.metrics)
            continue
        yield f"{place}/run.json", to_json(run, indent=2) + "\n"
        yield f"{place}/steps.jsonl", "".join(f"{to_json(step)}\n" for step in result.steps)
        if result.telemetry:
            yield f"{place}/telemetry.jsonl", "".join(f"{to_json(sample)}\n" for sample in result.telemetry)


def _text(form: Callable[[Sequence[Row]], str], _: Sequence[Measured], rows: Sequence[Row], path: Path) -> list[str]:
    write_atomically(path, form(rows))
    return _names(rows)


def _wandb(runs: Sequence[Measured], rows: Sequence[Row], path: Path) -> list[str]:
    """Write an offline run each, which `wandb sync` uploads."""
    os.environ.update(SILENT)
    try:
        wandb: Any = import_module("wandb")
    except ImportError as error:
        raise ConfigError("--to wandb-offline needs wandb, which is not installed: pip install wandb") from error
    written = []
    for item, row in zip(runs, rows, strict=True):
        run = item.result.run
        if run.outcome == "running" or any(path.glob(f"wandb/offline-run-*-{run.run_id}")):
            continue
        path.mkdir(parents=True, exist_ok=True)
        target = wandb.init(
            project=PROJECT,
            id=run.run_id,
            name=run.run_id,
            dir=str(path),
            mode="offline",
            config=settings_of(row),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True),
        )
        for step in item.result.steps:
            target.log(step_values(step), step=step.step)
        target.summary.update(results_of(row))
        target.finish(exit_code=0 if run.outcome == "completed" else 1)
        written.append(run.run_id)
    return written


def _names(rows: Sequence[Row]) -> list[str]:
    return [str(row["run_id"]) for row in rows]


TARGETS: Mapping[str, Callable[[Sequence[Measured], Sequence[Row], Path], list[str]]] = {
    "csv": partial(_text, comma_separated),
    "json": partial(_text, as_json),
    "wandb-offline": _wandb,
}
"""Value of --to -> its writer."""
