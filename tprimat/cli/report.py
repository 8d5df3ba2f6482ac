"""One page on training runs, in one file that opens offline: who wins, by how much, how sure, and what stands behind it.

python -m tprimat.cli.report output                       writes ./report.html
python -m tprimat.cli.report before after results.tar.gz --output both.html
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tprimat.cli.common import add_probes
from tprimat.cli.console import outlasting
from tprimat.errors import RecordError, UserError


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m tprimat.cli.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="folders, files or archives with results")
    made.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help="where to write (./report.html)")
    counting(made)
    return made


def counting(made: argparse.ArgumentParser) -> None:
    """The flags that say how metrics are counted, as compare.py has them."""
    made.add_argument("--flops", choices=("causal", "full", "6n"), default="causal", help="how FLOP are counted (causal)")
    made.add_argument("--warmup", default="auto", metavar="N", help="steps to leave out, or auto: found in the step times (auto)")
    made.add_argument("--cost-per-gpu-hour", type=float, metavar="PRICE", help="adds a column of cost, in your currency")
    made.add_argument("--config", type=Path, metavar="FILE", help="take prices from its cloud_costs (./config.yaml)")
    add_probes(made, "among the results")


def page(options: argparse.Namespace) -> tuple[str, list[RecordError]]:
    """The page, and what could not be read.

    Raises:
        RecordError: nothing at all could be read.
    """
    from tprimat.analyze.groups import group_runs
    from tprimat.analyze.ranking import rankings
    from tprimat.cli.compare import measured_runs
    from tprimat.report.html.page import Report, html_report

    measured, problems = measured_runs(options, options.results)
    for problem in problems:
        print(f"skipped: {problem}", file=sys.stderr)
    if not measured:
        places = ", ".join(map(str, options.results))
        raise RecordError("No result to report on.", where=places, fix="./benchmark.py writes results to ./output")
    report = Report(
        rankings=tuple(rankings(group_runs(measured))),
        not_counted=tuple(item for item in measured if item.not_counted is not None),
        problems=tuple(problems),
    )
    return html_report(report), problems


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 when a file was bad."""
    from tprimat.records.files import write_atomically

    text, problems = page(options)
    write_atomically(options.output, text)
    print(options.output)
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when a file was bad and left out, 2 for a mistake in the command line."""
    options = parser().parse_args(argv)
    try:
        return run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(outlasting(main))
