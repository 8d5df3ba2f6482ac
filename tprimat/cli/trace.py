"""Show what one training step spends its time on, from a trace of torch's profiler.

tprimat trace output                              the traces of a folder of results
tprimat trace trace.json.gz --json
tprimat trace trace.json.gz --output dp4.json     only the summary, a few kB; later calls read it like a trace
tprimat trace dp4.json tp4.json --markdown        one table, a column per trace
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.core.errors import ConfigError, RecordError, UserError

if TYPE_CHECKING:
    from tprimat.analyze.trace import ProfileSummary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "traces", nargs="+", type=Path, metavar="TRACE", help="of torch's profiler: .json or .json.gz, or a folder with results"
    )
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON, one line per trace")
    parser.add_argument("--markdown", action="store_true", help="print one table in Markdown, a column per trace")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the summary of a single trace as JSON")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, or 2 where a trace could not be read; the others are shown."""
    worst, summaries, paths = 0, {}, []
    for given in options.traces:
        try:
            paths += traces_in(given)
        except UserError as error:
            worst = _refused(error)
    if options.output and len(paths) > 1:
        raise ConfigError("--output takes the summary of one trace.", where="--output", fix="one call for each")
    for path in paths:
        try:
            summaries[path.name.partition(".")[0]] = show(path, options)
        except UserError as error:
            worst = _refused(error)
    if options.markdown and summaries:
        from tprimat.report.trace import markdown

        print(markdown(summaries))
    return worst


def _refused(error: UserError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


def traces_in(path: Path) -> list[Path]:
    """Return the traces that runs left in a folder; for a file, the file itself.

    Raises:
        RecordError: there is none.
    """
    if not path.is_dir():
        return [path]
    if found := sorted(path.glob("profile_*.json")):
        return found
    why = "Looked for profile_*.json, which a run with the profiler leaves."
    raise RecordError(f"There is no trace in {path}.", where=str(path), why=why, fix="--set profiling.enabled=true in a run")


def show(path: Path, options: argparse.Namespace) -> "ProfileSummary":
    """Print or write one summary."""
    from tprimat.records.store import as_document, to_json, write_atomically
    from tprimat.report.screen import screen_of
    from tprimat.report.trace import text

    summary = read_summary(path)
    if options.output:
        write_atomically(options.output, to_json(summary, indent=2) + "\n")
    if options.json:
        print(json.dumps({"trace": str(path), **as_document(summary)}), flush=True)
    elif not options.markdown:
        print(f"{path}\n{text(summary, screen_of(sys.stdout))}\n", flush=True)
    return summary


def read_summary(path: Path) -> "ProfileSummary":
    """Summarise a trace, or read a summary that `--output` has written.

    Raises:
        RecordError: the file cannot be read, or is neither.
        MetricError: nothing in the trace takes time.
    """
    from tprimat.analyze.trace import ProfileSummary, summarise
    from tprimat.records.store import from_json
    from tprimat.records.trace import is_trace, read_document, trace_of

    document = read_document(path)
    if not is_trace(document) and isinstance(document, dict) and "classes" in document:
        return from_json(ProfileSummary, json.dumps(document), where=str(path))
    return summarise(trace_of(document, path))
