"""Draw peak throughput in up to nine panels.

./visualize_peak_throughput.py                            results in output, output-* and all_outputs/*
./visualize_peak_throughput.py --results-dir h100 mi300x --output peak.svg
"""

import argparse
import sys
from pathlib import Path

from tprimat.cli.common import add_picture, panels_of
from tprimat.cli.peak import add_peak_counting, read_peak_results
from tprimat.core.errors import RecordError

PICTURE = Path("peak_throughput_analysis.png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_peak_counting(parser)
    parser.add_argument("--output", type=Path, default=PICTURE, metavar="FILE", help=f"png, svg or pdf ({PICTURE})")
    add_picture(parser)
    parser.add_argument("--even-if-different", action="store_true", help="compare machines although their work differs")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, or 1 when a file was bad."""
    from tprimat.report.plots.peak import panel_words, peak_sheet
    from tprimat.report.plots.sheet import draw_sheet
    from tprimat.runner.analysis import analyse_peaks

    results, metrics = read_peak_results(options)
    analysis = analyse_peaks(results.measured, metrics, even_if_different=options.even_if_different)
    if not analysis.peaks:
        causes = "\n".join(dict.fromkeys(item.not_counted or "" for item in analysis.not_counted))
        raise RecordError(
            "No run counts, so there is nothing to draw.", why=causes, fix="./analyze_peak_throughput.py names them"
        )
    sheet, chosen = peak_sheet(analysis), panels_of(options)
    draw_sheet(sheet, options.output, panels=chosen, dark=options.dark)
    words = "" if chosen is not None else f" ({panel_words(sheet, analysis)})"
    print(f"written: {options.output}{words}", file=sys.stderr)
    return 1 if results.problems else 0
