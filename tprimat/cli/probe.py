"""Measure how fast single operations run on this machine.

tprimat probe gemm,memory
tprimat probe all --output output --time-budget 240
tprimat probe gemm --dtype bf16,fp8 --json
tprimat probe rounds --dtype bf16,fp8                   the same products three times, warm and under sustained load
tprimat probe pieces,overlap                            the operations that predictions add up
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.common import positive
from tprimat.records.discover import PROBES_FILE
from tprimat.runner.probes import (
    KINDS,
    ON_REQUEST,
    RANK_KINDS,
    ProbeRequest,
    measure,
    measure_as_rank,
    parse_kinds,
    require_torch,
    tell,
)

if TYPE_CHECKING:
    from tprimat.records.schema import ProbeRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    known, apart = ", ".join((*KINDS, *ON_REQUEST)), ", ".join(ON_REQUEST)
    parser.add_argument("kinds", help=f"comma-separated: {known}; all leaves out {apart}")
    add_measuring(parser, f"folder of {PROBES_FILE}")
    parser.add_argument(
        "--dtype", metavar="LIST", help="dtypes of matrix products: bf16,fp8,fp16,tf32,fp32 (all; on a CPU bf16,fp16,fp32)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="measure the matrix products of its models (config.yaml)")
    parser.add_argument("--resume", action="store_true", help=f"skip what {PROBES_FILE} contains for this machine and software")
    parser.add_argument("--json", action="store_true", help="print the records, one per line")


def add_measuring(parser: argparse.ArgumentParser, output: str) -> None:
    """Add the flags that say how long and at which sizes is measured, and where the records go."""
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help=f"{output} (./output)")
    parser.add_argument("--time-budget", type=float, metavar="S", help="start no measurement after this many seconds")
    parser.add_argument("--ranks", type=positive, metavar="N", help="ranks of collectives and ddp (every GPU; 2 on a CPU)")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", dest="small", action="store_true", default=None, help="small sizes (the default on a CPU)")
    sizes.add_argument("--full", dest="small", action="store_false", help="full sizes even on a CPU")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, 1 if ranks failed."""
    request = ProbeRequest(
        kinds=parse_kinds(options.kinds),
        output=options.output,
        small=options.small,
        seconds=options.time_budget,
        dtypes=tuple(options.dtype.split(",")) if options.dtype else None,
        config=options.config,
        ranks=options.ranks,
        resume=options.resume,
    )
    require_torch()
    from tprimat.probe.device import is_rank

    if is_rank():
        measure_as_rank(request)
        return 0
    return show(measure(request), request.file, as_json=options.json)


def show(records: Iterable["ProbeRecord"], file: Path, *, as_json: bool) -> int:
    """Print the results; return 1 if ranks failed. An operation that a device refuses is a result."""
    from tprimat.records.store import to_json
    from tprimat.report.tables import plural

    began = datetime.now(timezone.utc).replace(microsecond=0)  # records have whole seconds
    measured = []
    for record in records:
        measured.append(record)
        if as_json:
            print(to_json(record), flush=True)
    if measured and not as_json:
        print_tables(measured)
    new = sum(datetime.fromisoformat(record.started_at) >= began for record in measured)
    earlier = f" and {len(measured) - new} earlier ones" if new < len(measured) else ""
    failed = sum(record.error is not None for record in measured)
    without = f", {failed} without a result" if failed else ""
    tell(f"{plural(new, 'measurement')}{earlier}{without}; all samples are in {file}")
    return int(any(record.kind in RANK_KINDS and record.error for record in measured))


def print_tables(records: Sequence["ProbeRecord"]) -> None:
    """Print the tables of each kind."""
    from tprimat.analyze.probes import newest_of_each
    from tprimat.report.probes import LESS_IMPORTANT
    from tprimat.report.screen import screen_of
    from tprimat.report.suite import caution, sections
    from tprimat.report.tables import markdown_as_text

    newest = newest_of_each(records)
    page = "\n\n".join([*caution(newest), *sections(newest)])
    print(markdown_as_text(page, screen_of(sys.stdout), LESS_IMPORTANT))
