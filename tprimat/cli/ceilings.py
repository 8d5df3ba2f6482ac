"""Holds runs against what probes of their machine measured."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.errors import RecordError
from tprimat.record.archive import is_archive, unpacked
from tprimat.record.schema import ProbeRecord, RunRecord
from tprimat.record.store import read_probes

if TYPE_CHECKING:
    from tprimat.analyze.metrics import MetricOptions

FILE_NAME = "probes.jsonl"


def probes_in(paths: Iterable[Path]) -> tuple[list[ProbeRecord], list[RecordError]]:
    """All probes that lie directly in some folders of results, or anywhere in archives, and what could not be read."""
    found: list[ProbeRecord] = []
    problems: list[RecordError] = []
    for place in dict.fromkeys(path if path.is_dir() or is_archive(path) else path.parent for path in paths):
        try:
            found += _in_archive(place) if is_archive(place) and place.is_file() else read_probes(place / FILE_NAME)
        except RecordError as error:
            problems.append(error)
    return found, problems


def _in_archive(archive: Path) -> list[ProbeRecord]:
    """None of one that is damaged: who reads its results says so."""
    try:
        with unpacked(archive) as folder:
            return [probe for file in sorted(folder.rglob(FILE_NAME)) for probe in read_probes(file)]
    except RecordError:
        return []


def under_ceiling(options: "MetricOptions", run: RunRecord, probes: Sequence[ProbeRecord]) -> "MetricOptions":
    """The options with the best product measured on the run's machine, and why probes were left out; as they are without any."""
    from tprimat.analyze.ceiling import gemm_ceiling

    if not probes:
        return options
    ceiling = gemm_ceiling(run, probes)
    return replace(options, gemm_ceiling_flops=ceiling.flop_per_second, gemm_ceiling_notes=ceiling.notes)
