"""What every command that judges results reads: runs with their metrics, held against the products probed beside them."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tprimat.analyze.groups import Measured, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.roofline import under_ceiling
from tprimat.errors import RecordError
from tprimat.records.discover import check_probes, load_results, probes_in

USUAL_PLACES = ("output", "output-*", "all_outputs/*")


def usual_folders() -> list[Path]:
    """Where ./benchmark.py and ./run_all_configs.sh leave results, as far as they are here.

    Raises:
        RecordError: none is.
    """
    found = [path for pattern in USUAL_PLACES for path in sorted(Path().glob(pattern)) if path.is_dir()]
    if not found:
        raise RecordError(
            "There is no folder of results here.",
            where=", ".join(USUAL_PLACES),
            fix="./benchmark.py writes to ./output; or --results-dir with folders of results",
        )
    return found


def read_measured(
    paths: Sequence[Path], options: MetricOptions, prices: Mapping[str, float], probes_too: Sequence[Path] = ()
) -> tuple[list[Measured], list[RecordError]]:
    """All runs under some paths with their metrics, and what could not be read.

    Args:
        paths: folders, files and archives of results; probes among them are used.
        options: how metrics are counted.
        prices: of a GPU hour by accelerator.
        probes_too: places of further probes.

    Raises:
        RecordError: a place of probes has none.
    """
    results, problems = load_results(paths)
    probes, damaged = probes_in([*paths, *check_probes(probes_too)])
    measured = [measure(result, under_ceiling(options, result.run, probes), prices) for result in results]
    return measured, [*problems, *damaged]


def tell_problems(problems: Sequence[RecordError], read: int) -> None:
    """Names what was passed over, on stderr."""
    for problem in problems:
        print(f"skipped: {problem}", file=sys.stderr)
    if problems:
        print(f"{len(problems)} of {len(problems) + read} results could not be read", file=sys.stderr)
