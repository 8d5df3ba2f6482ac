"""Compare predictions of memory and time with what was measured.

tprimat accuracy output                                      results, with the probes that lie with them
tprimat accuracy output --probes other/probes.jsonl
tprimat accuracy --rows rows.jsonl --json                    rows of Megatron-LM's tests, with a prediction in each
"""

import argparse
import sys
from pathlib import Path

from tprimat.cli.common import add_probes, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("results", nargs="*", type=Path, help="folders, files or archives with results (./output)")
    parser.add_argument(
        "--rows",
        action="append",
        default=[],
        type=Path,
        metavar="FILE.jsonl",
        help="rows as in benchmarks/records/megatron-goldens/rows.jsonl; may be repeated",
    )
    add_probes(parser, "with the results")
    parser.add_argument("--json", action="store_true", help="errors by group and every row, as one JSON document")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0."""
    from tprimat.report import accuracy
    from tprimat.report.screen import screen_of
    from tprimat.report.tables import markdown_as_text
    from tprimat.runner.accuracy import Ledger, read_rows, score_records, score_rows

    paths = options.results or ([] if options.rows else [Path("output")])
    ledger = score_records(paths, [*paths, *options.probes]) if paths else Ledger()
    memory, time, rows = score_rows(row for file in options.rows for row in read_rows(file))
    sets = {"memory": ledger.memory, "time": ledger.time, "rows_memory": memory, "rows_time": time}
    if options.json:
        found = {name: scores for name, scores in sets.items() if scores}
        print_json({"groups": accuracy.summary_document(found), "choices": accuracy.choices_document(ledger.time), "rows": rows})
        return 0
    parts = []
    if ledger.memory:
        parts += ["Memory", accuracy.memory_table(ledger.memory), accuracy.memory_rows(ledger.memory)]
    if ledger.time:
        parts += ["Time of a step", accuracy.time_table(ledger.time), accuracy.time_rows(ledger.time)]
    if memory:
        parts += ["Memory of the rows", accuracy.memory_table(memory)]
    if time:
        parts += ["Time of the rows", accuracy.error_table(time)]
    print(markdown_as_text("\n\n".join(parts) or "No result of these could be predicted.", screen_of(sys.stdout), drop=["group"]))
    return 0
