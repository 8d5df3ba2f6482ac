"""Write one row per run, with every field, for notebooks and spreadsheets. docs/results.md explains the columns.

tprimat export --to csv runs.csv
"""

import argparse
from pathlib import Path

from tprimat.cli.common import add_counting, add_results_dir, read, results_dirs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("path", type=Path, metavar="PATH", help="where to write")
    parser.add_argument("--to", required=True, choices=("csv", "json"), help="format")
    add_results_dir(parser, "./output")
    add_counting(parser)


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 where a file of results was damaged, after the others were written."""
    from tprimat.records.store import write_atomically
    from tprimat.report.export import as_json, comma_separated, rows_of
    from tprimat.report.tables import plural
    from tprimat.runner.export import places_of

    folders = results_dirs(options) or [Path("output")]
    results = read(options, folders, to_share=True)
    places = places_of(results.measured, folders)
    rows = [row | {"path": place} for row, place in zip(rows_of(results.measured), places, strict=True)]
    write_atomically(options.path, comma_separated(rows) if options.to == "csv" else as_json(rows))
    print(f"{options.path}: {plural(len(rows), 'run')}")
    return 1 if results.problems else 0
