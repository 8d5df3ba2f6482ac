"""Write one row per run, with every field, for notebooks and experiment trackers. docs/results.md explains the columns.

tprimat export --to csv runs.csv
tprimat export --to wandb-offline wandb                 then: wandb sync wandb/wandb/offline-run-*
"""

import argparse
from pathlib import Path

from tprimat.cli.common import add_counting, add_results_dir, read, results_dirs

TARGETS = ("csv", "json", "wandb-offline")
"""Of runner/export.py, which imports more than --help needs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="where to write: a file for csv and json, a folder for wandb-offline"
    )
    parser.add_argument("--to", required=True, choices=TARGETS, help="format or tracker; some need their own library")
    add_results_dir(parser, "./output")
    add_counting(parser)


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 where a file of results was damaged, after the others were written."""
    from tprimat.report.tables import plural
    from tprimat.runner.export import export

    folders = results_dirs(options) or [Path("output")]
    results = read(options, folders, to_share=True)
    written = export(results.measured, options.to, options.path, folders)
    others = [item.result.run for item in results.measured if item.result.run.run_id not in written]
    left_out = sum(run.outcome == "running" for run in others)
    counts = ((len(others) - left_out, "were there already"), (left_out, "left out, for lack of an end"))
    besides = ", ".join(f"{count} {what}" for count, what in counts if count)
    print(f"{options.path}: {plural(len(written), 'run')}" + (f" ({besides})" if besides else ""))
    return 1 if results.problems else 0
