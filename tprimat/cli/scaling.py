"""Show what more GPUs gain: throughput, multiplier and efficiency, for weak or strong scaling, with fitted scaling laws.

tprimat scaling output-1gpu output-2gpus output-4gpus
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.common import print_json, report_read

if TYPE_CHECKING:
    from tprimat.analyze.scaling import Series

THROUGHPUT_PICTURE = "img_throughput.png"
MULTIPLIER_PICTURE = "img_multiplier.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("results", nargs="*", type=Path, help="folders or files with results on several numbers of GPUs")
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help=f"where {THROUGHPUT_PICTURE} and the other go (.)"
    )
    parser.add_argument("--format", choices=("text", "md", "json"), default="text", help="format of the output (text)")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, or 1 when a file was bad."""
    from tprimat.report.plots.scaling import draw_multiplier, draw_throughput

    scaled, bad_files = read_series(options)
    draw_throughput(scaled, options.output / THROUGHPUT_PICTURE)
    draw_multiplier(scaled, options.output / MULTIPLIER_PICTURE)
    show(scaled, options.format)
    print(f"written: {options.output / THROUGHPUT_PICTURE}, {options.output / MULTIPLIER_PICTURE}", file=sys.stderr)
    return 1 if bad_files else 0


def read_series(options: argparse.Namespace) -> "tuple[list[Series], int]":
    """Read the series among results, and count the files that were bad.

    Raises:
        UserError: there is no series.
    """
    from tprimat.analyze.metrics import MetricOptions
    from tprimat.runner.analysis import read_results, result_folders
    from tprimat.runner.scaling import scaling_of

    folders = options.results or result_folders()
    results = read_results(folders, MetricOptions(), {})
    report_read(results, folders)
    return scaling_of(results.measured), len(results.problems)


def show(scaled: "list[Series]", style: str) -> None:
    """Print the series as text, Markdown or JSON."""
    from tprimat.report import scaling
    from tprimat.report.screen import screen_of

    if style == "json":
        print_json(scaling.as_document(scaled))
    else:
        print(scaling.as_markdown(scaled) if style == "md" else scaling.text(scaled, screen_of(sys.stdout)), end="")
