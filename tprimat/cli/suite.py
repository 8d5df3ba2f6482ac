"""Measure an accelerator with every probe, from single operations to small training loops, and write one page about it.

tprimat suite
tprimat suite --output output --time-budget 600
tprimat suite --output output --page-only

A second call continues where the first one stopped: it does not repeat what probes.jsonl already holds for this machine and
software.
"""

import argparse

from tprimat.cli.probe import add_measuring
from tprimat.runner.probes import KINDS, ProbeRequest, probes_to_skip, run_suite, tell, write_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_measuring(parser, "folder of records and page")
    parser.add_argument("--skip", default="", metavar="LIST", help=f"probes to skip, of {', '.join(KINDS)}")
    parser.add_argument("--page-only", action="store_true", help="measure nothing; write the page from the records")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, or 130 after Ctrl-C, 143 after SIGTERM; the page holds what was measured."""
    skipped = probes_to_skip(options.skip)
    request = ProbeRequest(
        kinds=tuple(kind for kind in KINDS if kind not in skipped),
        output=options.output,
        small=options.small,
        seconds=options.time_budget,
        ranks=options.ranks,
        resume=True,
    )
    stopped_by = None if options.page_only else run_suite(request)
    print(write_page(options.output))
    if stopped_by is None:
        return 0
    tell("stopped; the same command continues from here")
    return 128 + stopped_by
