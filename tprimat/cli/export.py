"""Write one row per run, with every field, for notebooks, spreadsheets and W&B. docs/results.md explains the columns.

tprimat export --to csv runs.csv
tprimat export --to wandb-offline wandb                 then: wandb sync wandb/wandb/offline-run-*
"""

import argparse
from pathlib import Path

from tprimat.cli.common import add_counting, add_results_dir, read, results_dirs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("path", type=Path, metavar="PATH", help="where to write: a file, or a folder of W&B")
    parser.add_argument("--to", required=True, choices=("csv", "json", "wandb-offline"), help="format")
    add_results_dir(parser, "./output")
    add_counting(parser)


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 where a file of results was damaged, after the others were written."""
    from tprimat.records.store import write_atomically
    from tprimat.report.export import as_json, comma_separated, rows_of
    from tprimat.report.tables import plural
    from tprimat.runner.export import places_of, to_wandb

    folders = results_dirs(options) or [Path("output")]
    results = read(options, folders, to_share=True)
    places = places_of(results.measured, folders)
    rows = [row | {"path": place} for row, place in zip(rows_of(results.measured), places, strict=True)]
    written = len(rows)
    if options.to == "wandb-offline":
        written = to_wandb(results.measured, rows, options.path)
    else:
        write_atomically(options.path, comma_separated(rows) if options.to == "csv" else as_json(rows))
    print(f"{options.path}: {plural(written, 'run')}" + (f" of {len(rows)}" if written < len(rows) else ""))
    return 1 if results.problems else 0
