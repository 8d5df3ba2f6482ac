"""Check every model x platform x strategy of a configuration."""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--config", type=Path, help="instead of config.yaml")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs on each node (default: what the file says, else 8)")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 all cells are valid, 1 some are not."""
    from tprimat.runner.matrix import check_matrix, warnings_about

    cells = list(check_matrix(options.config, options.gpus))
    for cell in cells:
        print(f"{cell.model:<12} {cell.platform:<7} {cell.strategy:<24} {cell.description}")
    failures = [cell.error for cell in cells if cell.error is not None]
    for error in failures:
        print(f"\nerror: {error}", file=sys.stderr)
    defined = sum(not cell.left_out for cell in cells)
    for warning in warnings_about(options.config):
        print(f"warning: {warning}", file=sys.stderr)
    left_out = f", {len(cells) - defined} left out" if defined < len(cells) else ""
    print(f"{defined - len(failures)} of {defined} valid{left_out}")
    return 1 if failures else 0
