"""Say whether two ways to train reach the same losses: bf16 against fp8, engine against engine, layout against layout.

tprimat parity output-fp32 output-bf16                  runs of the same seeds on the same data
tprimat parity output-bf16 output-fp8 --within 2%
"""

import argparse
import sys
from pathlib import Path

from tprimat.cli.common import fraction, print_json
from tprimat.core.errors import ConfigError

PICTURE = Path("parity.png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("reference", type=Path, metavar="A", help="runs of one configuration: a folder, file or archive")
    parser.add_argument("candidate", type=Path, metavar="B", help="runs that should reach the same losses")
    parser.add_argument("--within", default="1%", metavar="1%", help="largest difference of losses that counts as parity (1%%)")
    parser.add_argument("--output", type=Path, default=PICTURE, metavar="FILE", help=f"the picture ({PICTURE})")
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON document")


WIDEST = 0.2
"""Losses that differ by more are those of another model."""


def margin(text: str) -> float:
    """Parse --within as a fraction above 0 and up to WIDEST.

    Raises:
        ConfigError: it is none.
    """
    value = fraction(text, "--within", "1% or 0.01")
    if 0 < value <= WIDEST:
        return value
    why = "An interval is never inside a margin of nothing." if value == 0 else "Such losses are those of another model."
    raise ConfigError(f"--within is {text!r}.", where="--within", why=why, fix="above 0, and up to 20%: 1% or 0.01")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 for parity, 1 where it is refuted, 3 where the steps do not decide."""
    from tprimat.report.parity import as_document, text
    from tprimat.report.plots.parity import draw_parity
    from tprimat.report.screen import screen_of
    from tprimat.runner.parity import compare_losses

    report = compare_losses(options.reference, options.candidate, margin(options.within))
    if options.json:
        print_json(as_document(report))
    else:
        print(text(report, screen_of(sys.stdout)), end="")
    draw_parity(report, options.output)
    print(f"written: {options.output}", file=sys.stderr)
    return {"parity": 0, "refuted": 1, "undecided": 3}[report.parity.outcome]
