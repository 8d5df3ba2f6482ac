"""tprimat.cli.common."""

import argparse
from pathlib import Path

from tprimat.records.discover import PROBES_FILE


def add_probes(made: argparse.ArgumentParser | argparse._ArgumentGroup, beside: str) -> None:
    """The flag that names probes which do not lie with the results."""
    made.add_argument(
        "--probes",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help=f"of this machine: a {PROBES_FILE} or its folder, besides those {beside}; may be repeated",
    )
