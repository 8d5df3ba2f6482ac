"""Name runs by the folders that hold them, pack them into an archive, and write them for W&B."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tprimat.analyze.groups import Measured
from tprimat.core.errors import ConfigError
from tprimat.records.benchmark_file import benchmark_text
from tprimat.records.discover import is_result_file
from tprimat.records.schema import ProbeRecord
from tprimat.records.sharing import shareable
from tprimat.records.store import as_document, cannot_write, to_json
from tprimat.report.export import Row

SILENT = {"DO_NOT_TRACK": "true", "WANDB_ERROR_REPORTING": "false"}
"""Variables that keep W&B from calling its makers: an export leaves this machine only where the user takes it."""


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


def to_wandb(runs: Sequence[Measured], rows: Sequence[Row], folder: Path) -> int:
    """Write an offline run for each that has ended and is not there yet, which `wandb sync` uploads, and return their number.

    Raises:
        ConfigError: wandb is not installed.
        RecordError: the folder cannot be written.
    """
    os.environ.update(SILENT)
    try:
        wandb: Any = import_module("wandb")
    except ImportError as error:
        raise ConfigError("--to wandb-offline needs wandb, which is not installed: pip install wandb") from error
    new = [(item.result, row) for item, row in zip(runs, rows, strict=True) if item.result.run.outcome != "running"]
    new = [pair for pair in new if not any(folder.glob(f"wandb/offline-run-*-{pair[0].run.run_id}"))]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    for result, row in new:
        name = result.run.run_id
        target = wandb.init(project="tprimat", id=name, name=name, dir=str(folder), mode="offline", config=row, settings=settings)
        for step in result.steps:
            target.log(as_document(step), step=step.step)
        target.summary.update({name: value for name, value in row.items() if isinstance(value, int | float)})
        target.finish(exit_code=0 if result.run.outcome == "completed" else 1)
    return len(new)
