"""Measure an accelerator with every probe, from bare operations to small training loops, and write one page about it.

tprimat suite
tprimat suite --output output --time-budget 600
tprimat suite --output output --page-only

A second call continues where the first one stopped: measurements that probes.jsonl holds for this machine and software are
not repeated.
"""

import argparse
from pathlib import Path

from tprimat.cli.common import positive
from tprimat.runner.probes import PROBES, SuiteOptions, probes_to_skip, run_suite, tell, write_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--output", type=Path, default=Path("output"), metavar="DIR", help="folder of records and page (default: ./output)"
    )
    parser.add_argument("--time-budget", type=float, metavar="S", help="start no measurement after this many seconds")
    parser.add_argument("--skip", default="", metavar="LIST", help=f"probes to skip, of {', '.join(PROBES)}")
    parser.add_argument(
        "--ranks", type=positive, metavar="N", help="ranks of collectives and ddp (default: every GPU; 2 on a CPU)"
    )
    parser.add_argument("--page-only", action="store_true", help="measure nothing; write the page from the records")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", dest="size", action="store_const", const="small", help="small sizes (default on a CPU)")
    sizes.add_argument("--full", dest="size", action="store_const", const="full", help="full sizes even on a CPU")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, or 130 after Ctrl-C, 143 after SIGTERM; the page holds what was measured."""
    suite = SuiteOptions(
        output=options.output,
        skip=probes_to_skip(options.skip),
        time_budget_seconds=options.time_budget,
        ranks=options.ranks,
        size=options.size,
    )
    stopped_by = None if options.page_only else run_suite(suite)
    print(write_page(options.output))
    if stopped_by is None:
        return 0
    tell("stopped; the same command continues from here")
    return 128 + stopped_by
