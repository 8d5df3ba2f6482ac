"""Check every model x platform x strategy of a configuration."""

import argparse
import sys
from pathlib import Path

from tprimat.core.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="instead of config.yaml")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs per node, ignored on a CPU (default: from the file, otherwise 8)"
    )


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 all cells are valid, 1 some are not."""
    from tprimat.report.screen import screen_of
    from tprimat.runner.validate import check_configuration

    cells, screen = list(check_configuration(options.config, options.gpus)), screen_of(sys.stdout)
    widths = [
        max((len(name) for name in names), default=0) for names in zip(*((c.model, c.strategy) for c in cells), strict=True)
    ]
    for cell in cells:
        name = f"{cell.model:<{widths[0]}} {cell.platform:<6} {cell.strategy:<{widths[1]}} "
        print(screen.prose(f"{name}{cell.description}", len(name), "refused" if cell.error and not cell.left_out else None))
    alike: dict[tuple[str | None, ...], list[UserError]] = {}
    for error in (cell.error for cell in cells if cell.error is not None and not cell.left_out):
        alike.setdefault((error.what, error.why, error.fix), []).append(error)
    for errors in alike.values():
        more = f"\n  {len(errors) - 1} more cells have the same problem" if len(errors) > 1 else ""
        print(f"\nerror: {errors[0]}{more}", file=sys.stderr)
    failures, defined = sum(map(len, alike.values())), sum(not cell.left_out for cell in cells)
    left_out = f", {len(cells) - defined} left out" if defined < len(cells) else ""
    print(f"{defined - failures} of {defined} valid{left_out}")
    return 1 if failures else 0
