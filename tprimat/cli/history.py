"""Show the rate of each configuration over time, where it changed, and what changed with it.

tprimat history results                                         all runs below a folder
tprimat history results --output history.html                   also write a page with a curve for each configuration
tprimat history results --against new --fail-if-slower 3%       compare new runs with the last five good ones
"""

import argparse
import sys
from pathlib import Path

from tprimat.cli.common import fraction, nothing_read, positive, print_json
from tprimat.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "folders", nargs="*", type=Path, default=[Path("output")], help="folders that hold runs at any depth (./output)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="write a page")
    parser.add_argument("--against", type=Path, metavar="DIR", help="compare the runs below this folder with the past ones")
    parser.add_argument(
        "--last", type=positive, default=5, metavar="N", help="past runs of each configuration to compare with (5)"
    )
    parser.add_argument("--fail-if-slower", metavar="3%", help="with --against: exit 1 if slower by more, 3 if undecided")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 when a run cannot be read or the gate stays closed; 3 when the gate is undecided.

    Raises:
        ConfigError: --fail-if-slower without --against.
    """
    from tprimat.records.store import as_document, write_atomically
    from tprimat.report.comparison import text as compared
    from tprimat.report.history import page, text
    from tprimat.report.screen import screen_of
    from tprimat.runner.analysis import Gate, regression_gate
    from tprimat.runner.history import against_history, read_history

    if options.fail_if_slower and not options.against:
        raise ConfigError("--fail-if-slower needs new runs.", where="--fail-if-slower", fix="--against FOLDER")
    margin = None if options.fail_if_slower is None else fraction(options.fail_if_slower, "--fail-if-slower")
    history = read_history(options.folders)
    for problem in history.problems:
        print(f"skipped: {problem}", file=sys.stderr)
    if not (history.courses or history.not_counted or history.problems):
        raise nothing_read(options.folders)
    if options.output is not None:
        write_atomically(options.output, page(history.courses, history.not_counted))
        print(f"written: {options.output}", file=sys.stderr)
    if options.against is None:
        if options.json:
            print_json(as_document(history))
        else:
            print(text(history.courses, screen_of(sys.stdout), history.not_counted))
        return 1 if history.problems or not history.courses else 0
    comparison, alone = against_history(history, options.against, options.last)
    print(compared(comparison, screen_of(sys.stdout)), end="")
    gate = Gate() if margin is None else regression_gate(comparison, margin)
    without_past = [f"{label}: no past run of this configuration counts" for label in alone]
    for reason in (*gate.closed, *without_past, *gate.undecided):
        print(f"{'note' if margin is None else 'gate'}: {reason}", file=sys.stderr)
    if gate.closed or (without_past and margin is not None) or history.problems or not comparison.groups:
        return 1
    return 3 if gate.undecided else 0
