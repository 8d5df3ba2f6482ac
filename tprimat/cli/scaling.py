"""Show what more GPUs gain: throughput, multiplier and efficiency, for weak or strong scaling.

tprimat scaling output-1gpu output-2gpus output-4gpus
"""

import argparse
import sys
from pathlib import Path

from tprimat.cli.common import print_json, report_read

THROUGHPUT_PICTURE = "img_throughput.png"
MULTIPLIER_PICTURE = "img_multiplier.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("results", nargs="*", type=Path, help="folders or files with results on several numbers of GPUs")
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help=f"where {THROUGHPUT_PICTURE} and the other go (.)"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="format of the output (text)")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, or 1 when a file was bad."""
    from tprimat.analyze.metrics import MetricOptions
    from tprimat.report import scaling
    from tprimat.report.plots.scaling import draw_multiplier, draw_throughput
    from tprimat.report.tables import screen_of
    from tprimat.runner.analysis import by_folder, read_results, result_folders, scaling_of

    folders = options.results or result_folders()
    results = read_results(folders, MetricOptions(), {})
    if options.results:
        results = by_folder(results, folders)
    report_read(results, folders)
    scaled = scaling_of(results.measured)
    draw_throughput(scaled, options.output / THROUGHPUT_PICTURE)
    draw_multiplier(scaled, options.output / MULTIPLIER_PICTURE)
    if options.format == "json":
        print_json(scaling.as_document(scaled))
    else:
        print(scaling.text(scaled, screen_of(sys.stdout)), end="")
    print(f"written: {options.output / THROUGHPUT_PICTURE}, {options.output / MULTIPLIER_PICTURE}", file=sys.stderr)
    return 1 if results.problems else 0
