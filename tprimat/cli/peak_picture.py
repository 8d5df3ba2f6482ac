"""Nine panels about peak throughput in one picture.

./visualize_peak_throughput.py                            results in output, output-* and all_outputs/*
./visualize_peak_throughput.py --results-dir h100 mi300x --output peak.svg
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tprimat.cli import peak
from tprimat.cli.console import outlasting
from tprimat.errors import RecordError, UserError

PICTURE = Path("peak_throughput_analysis.png")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="visualize_peak_throughput.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    peak.add_counting(made)
    made.add_argument("--output", type=Path, default=PICTURE, metavar="FILE", help=f"png, svg or pdf ({PICTURE})")
    made.add_argument("--even-if-different", action="store_true", help="compare machines although their work differs")
    made.set_defaults(nodes="1", scaling_efficiency="1")
    return made


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, or 1 when a file was bad."""
    from tprimat.report.plots.peak import draw_peaks

    measured, bad = peak.measured_from(options)
    analysis = peak.analyse(measured, options)
    if not analysis.peaks:
        causes = "\n".join(dict.fromkeys(item.not_counted or "" for item in analysis.not_counted))
        raise RecordError(
            "No run counts, so there is nothing to draw.", why=causes, fix="./analyze_peak_throughput.py names them"
        )
    draw_peaks(analysis, options.output)
    print(f"written: {options.output}", file=sys.stderr)
    return 1 if bad else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 for bad files, 2 for a mistake in the command line."""
    options = parser().parse_args(argv)
    try:
        return run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(outlasting(main))
