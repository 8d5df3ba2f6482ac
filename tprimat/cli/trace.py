"""Show what one training step spends its time on, from a trace of torch's profiler.

tprimat trace output                              the traces of a folder of results
tprimat trace trace.json.gz --json > dp4.json     all numbers, a few kB
"""

import argparse
import json
import sys
from pathlib import Path

from tprimat.core.errors import RecordError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "traces", nargs="+", type=Path, metavar="TRACE", help="of torch's profiler: .json or .json.gz, or a folder with results"
    )
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON, one line per trace")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0."""
    for path in [path for given in options.traces for path in traces_in(given)]:
        show(path, as_json=options.json)
    return 0


def traces_in(path: Path) -> list[Path]:
    """Return the traces that runs left in a folder; for a file, the file itself.

    Raises:
        RecordError: there is none.
    """
    if not path.is_dir():
        return [path]
    if traces := sorted(path.glob("profile_*.json")):
        return traces
    why = "Looked for profile_*.json, which a run with the profiler leaves."
    raise RecordError(f"There is no trace in {path}.", where=str(path), why=why, fix="--set profiling.enabled=true in a run")


def show(path: Path, *, as_json: bool) -> None:
    """Print a summary.

    Raises:
        RecordError: the file cannot be read, or is no trace.
        MetricError: nothing in the trace takes time.
    """
    from tprimat.analyze.trace import summarise
    from tprimat.records.store import as_document
    from tprimat.records.trace import read_document, trace_of
    from tprimat.report.tables import screen_of
    from tprimat.report.trace import text

    summary = summarise(trace_of(read_document(path), path))
    if as_json:
        print(json.dumps({"trace": str(path), **as_document(summary)}), flush=True)
    else:
        print(f"{path}\n{text(summary, screen_of(sys.stdout))}\n", flush=True)
