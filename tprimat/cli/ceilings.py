"""Holds runs against what probes of their machine measured."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
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


def add_probes(made: argparse.ArgumentParser | argparse._ArgumentGroup, beside: str) -> None:
    """The flag that names probes which do not lie with the results."""
    made.add_argument(
        "--probes",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help=f"of this machine: a {FILE_NAME} or its folder, besides those {beside}; may be repeated",
    )


def check_probes(named: Sequence[Path]) -> tuple[Path, ...]:
    """The places that a user named.

    Raises:
        RecordError: one of them holds no probes.
    """
    for place in named:
        if not any(file.is_file() for file in _files_of(place)) and not _is_packed(place):
            raise RecordError(
                f"There is no {FILE_NAME} in {place}.", where="--probes", fix="./benchmark.py --probe gemm measures"
            )
    return tuple(named)


def probes_in(paths: Iterable[Path]) -> tuple[list[ProbeRecord], list[RecordError]]:
    """All probes anywhere in some folders and archives, beside files of results and above run folders; and what is damaged."""
    found: list[ProbeRecord] = []
    problems: list[RecordError] = []
    places = list(dict.fromkeys(paths))
    files = dict.fromkeys(file.resolve() for place in places if not _is_packed(place) for file in _files_of(place))
    for file in files:
        try:
            found += read_probes(file)
        except RecordError as error:
            problems.append(error)
    for archive in filter(_is_packed, places):
        found += _in_archive(archive)
    return found, problems


def _is_packed(place: Path) -> bool:
    return is_archive(place) and place.is_file()


def _files_of(place: Path) -> Iterator[Path]:
    """Where probes of a place of results would lie; files that need not exist."""
    if place.is_dir():
        yield from sorted(place.rglob(FILE_NAME))
        if (place / "run.json").is_file():
            yield place.parent.parent / FILE_NAME
        return
    yield place.parent / FILE_NAME


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
