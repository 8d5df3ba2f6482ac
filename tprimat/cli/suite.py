"""Measure an accelerator with every probe, from bare operations to small training loops, and write one page about it.

    python -m tprimat.cli.suite
    python -m tprimat.cli.suite --output output --time-budget 600
    python -m tprimat.cli.suite --output output --page-only

A second call continues where the first one stopped: measurements that probes.jsonl holds for this machine and software are
not repeated.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tprimat.cli.console import outlasting
from tprimat.errors import UserError
from tprimat.runner.suite import PROBES, SuiteOptions, log, probes_to_skip, run_suite, write_page


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tprimat.cli.suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output"), metavar="DIR", help="folder of records and page (default: ./output)"
    )
    parser.add_argument("--time-budget", type=float, metavar="S", help="start no measurement after this many seconds")
    parser.add_argument("--skip", default="", metavar="LIST", help=f"probes to skip, of {', '.join(PROBES)}")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of collectives and ddp (default: every GPU; 2 on a CPU)")
    parser.add_argument("--page-only", action="store_true", help="measure nothing; write the page from the records")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--small", dest="size", action="store_const", const="small", help="small sizes (default on a CPU)")
    sizes.add_argument("--full", dest="size", action="store_const", const="full", help="full sizes even on a CPU")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 2 for a user's mistake, 130 where the user stopped it; the page holds what was measured."""
    options = arguments(argv)
    stopped = False
    try:
        suite = SuiteOptions(
            output=options.output,
            skip=probes_to_skip(options.skip),
            time_budget_seconds=options.time_budget,
            ranks=options.ranks,
            size=options.size,
        )
        if not options.page_only:
            stopped = not run_suite(suite)
        print(write_page(options.output))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if stopped:
        log("stopped; the same command continues from here")
    return 130 if stopped else 0


if __name__ == "__main__":
    sys.exit(outlasting(main))
