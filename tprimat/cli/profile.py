"""python -m tprimat.cli.profile TRACE.json: what one step of training spends its time on.

python3 -m tprimat.cli.profile output/profile_cuda_llama_*.json
python3 -m tprimat.cli.profile trace.json.gz --json
python3 -m tprimat.cli.profile trace.json.gz --output dp4.json     the summary alone, a few kB, which is read like a trace
python3 -m tprimat.cli.profile dp4.json tp4.json --markdown        one table, a column each
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.console import outlasting
from tprimat.errors import UserError

if TYPE_CHECKING:
    from tprimat.analyze.trace import ProfileSummary


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m tprimat.cli.profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="of torch's profiler: .json or .json.gz")
    made.add_argument("--json", action="store_true", help="all numbers as JSON lines, one trace each")
    made.add_argument("--markdown", action="store_true", help="one table in Markdown, a column each")
    made.add_argument("--output", type=Path, metavar="FILE", help="write the summary of the one trace as JSON")
    return made


def summary_of(path: Path) -> "ProfileSummary":
    """Of a trace, or one that `--output` has written.

    Raises:
        RecordError: it cannot be read, or is neither.
        MetricError: nothing in the trace takes time.
    """
    from tprimat.analyze.trace import ProfileSummary, summarise
    from tprimat.records.files import from_json
    from tprimat.records.trace import is_trace, read_document, trace_of

    document = read_document(path)
    if not is_trace(document) and isinstance(document, dict) and "classes" in document:
        return from_json(ProfileSummary, json.dumps(document), where=str(path))
    return summarise(trace_of(document, path))


def show(path: Path, options: argparse.Namespace) -> "ProfileSummary":
    """Print or write one summary."""
    from tprimat.records.files import as_document, to_json, write_atomically
    from tprimat.report.trace import text

    summary = summary_of(path)
    if options.output:
        write_atomically(options.output, to_json(summary, indent=2) + "\n")
    if options.json:
        print(json.dumps({"trace": str(path), **as_document(summary)}), flush=True)
    elif not options.markdown:
        print(f"{path}\n{text(summary)}\n", flush=True)
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 where any trace could not be read or written about."""
    options = parser().parse_args(argv)
    if options.output and len(options.traces) > 1:
        print("error: --output takes the summary of one trace.\n  try   one call for each", file=sys.stderr)
        return 2
    worst, found = 0, {}
    for path in options.traces:
        try:
            found[path.name.partition(".")[0]] = show(path, options)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            worst = 2
    if options.markdown and found:
        from tprimat.report.trace import markdown

        print(markdown(found))
    return worst


if __name__ == "__main__":
    sys.exit(outlasting(main))
