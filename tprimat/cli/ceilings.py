"""Holds runs against what probes of their machine measured."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.errors import RecordError
from tprimat.record.schema import ProbeRecord, RunRecord
from tprimat.record.store import read_probes

if TYPE_CHECKING:
    from tprimat.analyze.metrics import MetricOptions

FILE_NAME = "probes.jsonl"


def probes_in(paths: Iterable[Path]) -> tuple[list[ProbeRecord], list[RecordError]]:
    """All probes that lie directly in some folders of results, and what could not be read."""
    found: list[ProbeRecord] = []
    problems: list[RecordError] = []
    for folder in dict.fromkeys(path if path.is_dir() else path.parent for path in paths):
        try:
            found += read_probes(folder / FILE_NAME)
        except RecordError as error:
            problems.append(error)
    return found, problems


def under_ceiling(options: "MetricOptions", run: RunRecord, probes: Sequence[ProbeRecord]) -> "MetricOptions":
    """The options with the best product measured on the run's machine, and why probes were left out; as they are without any."""
    from tprimat.analyze.ceiling import gemm_ceiling

    if not probes:
        return options
    ceiling = gemm_ceiling(run, probes)
    return replace(options, gemm_ceiling_flops=ceiling.flop_per_second, gemm_ceiling_notes=ceiling.notes)
