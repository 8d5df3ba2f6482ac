"""Write one HTML page about training runs, which opens offline: which wins, by how much, how sure, and on what evidence.

tprimat report output                                     writes ./report.html
tprimat report before after results.tar.gz --output both.html
"""

import argparse
from pathlib import Path

from tprimat.cli.common import add_counting, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="folders, files or archives with results")
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help="where to write (./report.html)")
    add_counting(parser)


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 when a file was bad."""
    from tprimat.records.store import write_atomically
    from tprimat.runner.analysis import report_page

    results = read(options, options.results, to_share=True)
    write_atomically(options.output, report_page(results))
    print(options.output)
    return 1 if results.problems else 0
