"""What more GPUs give: throughput, multiplier and efficiency, weak or strong, and the laws behind them.

python3 -m tprimat.cli.scaling output-1gpu output-2gpus output-4gpus
python3 -m tprimat.cli.scaling --table scaling.csv --output pictures
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.console import outlasting
from tprimat.errors import ConfigError, MetricError, UserError

if TYPE_CHECKING:
    from tprimat.analyze.groups import Measured
    from tprimat.analyze.scaling import Series
    from tprimat.report.scaling import FittedSeries

THROUGHPUT_PICTURE = "img_throughput.png"
MULTIPLIER_PICTURE = "img_multiplier.png"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python3 -m tprimat.cli.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("results", nargs="*", type=Path, help="folders or files with results, of several numbers of GPUs")
    made.add_argument("--table", type=Path, metavar="FILE.csv", help="a printed table instead: gpus, total tokens, elapsed time")
    made.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help=f"where {THROUGHPUT_PICTURE} and the other go (.)"
    )
    made.add_argument("--format", choices=("text", "md", "json"), default="text", help="what is printed (text)")
    return made


def scaled(found: "Sequence[Series]") -> "list[FittedSeries]":
    """Series with the laws that their points allow."""
    from tprimat.analyze.scaling import fit
    from tprimat.report.scaling import FittedSeries

    return [
        FittedSeries(series=made, fits=[law for law in (fit(made, "Amdahl"), fit(made, "USL")) if law is not None])
        for made in found
    ]


def scaling_of(measured: "Sequence[Measured]") -> "list[FittedSeries]":
    """Every series that some runs hold.

    Raises:
        MetricError: no configuration ran on two numbers of GPUs.
    """
    from tprimat.analyze.groups import group_runs
    from tprimat.analyze.scaling import series_of

    found = series_of(group_runs(measured))
    if not found:
        counted = sum(item.not_counted is None for item in measured)
        raise MetricError(
            "No configuration ran on two numbers of GPUs.",
            why=f"{counted} of {len(measured)} runs count.",
            fix="run the same strategy with --gpus 1, 2, 4 and 8",
        )
    return scaled(found)


def present(found: "Sequence[FittedSeries]", folder: Path, style: str = "text") -> str:
    """The report as text, Markdown or JSON; draws both pictures into a folder."""
    from tprimat.report import scaling
    from tprimat.report.plots import scaling as pictures

    pictures.draw_throughput(found, folder / THROUGHPUT_PICTURE)
    pictures.draw_multiplier(found, folder / MULTIPLIER_PICTURE)
    if style == "json":
        return json.dumps(scaling.as_document(found), indent=2, allow_nan=False) + "\n"
    return scaling.as_markdown(found) if style == "md" else scaling.text(found)


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, or 1 when a file was bad."""
    problems = 0
    if options.table is not None:
        if options.results:
            raise ConfigError("--table and results exclude each other.", where="--table", fix="leave one of them out")
        from tprimat.cli.scaling_table import read_scaling_table

        found = scaled([read_scaling_table(options.table)])
    else:
        from tprimat.analyze.metrics import MetricOptions
        from tprimat.cli.results import read_measured, tell_problems, usual_folders

        measured, bad = read_measured(options.results or usual_folders(), MetricOptions(), {})
        tell_problems(bad, len(measured))
        problems = len(bad)
        found = scaling_of(measured)
    print(present(found, options.output, options.format), end="")
    print(f"written: {options.output / THROUGHPUT_PICTURE}, {options.output / MULTIPLIER_PICTURE}", file=sys.stderr)
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 for bad files, 2 for a mistake in the command line or nothing to scale."""
    options = parser().parse_args(argv)
    try:
        return run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(outlasting(main))
