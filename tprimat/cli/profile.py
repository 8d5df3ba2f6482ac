"""python -m tprimat.cli.profile TRACE.json: what one step of training spends its time on.

python3 -m tprimat.cli.profile output/profile_cuda_llama_*.json
python3 -m tprimat.cli.profile trace.json.gz --json
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tprimat.errors import UserError


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
    return made


def show(path: Path, as_json: bool) -> None:
    """Print the summary of one trace."""
    from tprimat.analyze.profile import summarise
    from tprimat.record.files import as_document
    from tprimat.record.trace import read_trace
    from tprimat.report.profile import text

    summary = summarise(read_trace(path))
    print(json.dumps({"trace": str(path), **as_document(summary)}) if as_json else f"{path}\n{text(summary)}\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 where any trace could not be read."""
    options = parser().parse_args(argv)
    worst = 0
    for path in options.traces:
        try:
            show(path, options.json)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            worst = 2
    return worst


if __name__ == "__main__":
    sys.exit(main())
