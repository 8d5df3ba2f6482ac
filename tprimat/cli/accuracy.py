"""Compare predictions of memory and time with what was measured.

tprimat accuracy output                                      results, with the probes in the same folders
tprimat accuracy output --probes other/probes.jsonl
tprimat accuracy --rows rows.jsonl --json                    rows of Megatron-LM's tests, with a prediction in each

exit status: 0, 1 if none of the results can be predicted, 2 the request is invalid
"""

import argparse
import sys
from pathlib import Path

from tprimat.cli.common import add_probes, print_json, report_read


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
    add_probes(parser, "besides those with the results")
    parser.add_argument("--json", action="store_true", help="print errors by group and every row as one JSON document")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, or 1 where nothing can be predicted.

    Raises:
        RecordError: no result or no row could be read.
    """
    from tprimat.analyze.metrics import MetricOptions
    from tprimat.report import accuracy
    from tprimat.report.screen import screen_of
    from tprimat.report.tables import markdown_as_text
    from tprimat.runner.accuracy import FEWEST_STEPS, Ledger, read_rows, score_rows, score_runs
    from tprimat.runner.analysis import read_results

    paths = options.results or ([] if options.rows else [Path("output")])
    ledger = Ledger()
    if paths:
        results = read_results(paths, MetricOptions(), {})
        report_read(results, paths)
        ledger = score_runs(results.measured, [*paths, *options.probes])
    memory, time, rows = score_rows(row for file in options.rows for row in read_rows(file))
    sets = {"memory": ledger.memory, "time": ledger.time, "rows_memory": memory, "rows_time": time}
    if options.json:
        found = {name: scores for name, scores in sets.items() if scores}
        print_json({"groups": accuracy.summary_document(found), "choices": accuracy.choices_document(ledger.time), "rows": rows})
        return 0 if found else 1
    parts = []
    if ledger.memory:
        parts += ["Memory", accuracy.memory_table(ledger.memory), accuracy.memory_rows(ledger.memory)]
    if ledger.time:
        parts += ["Time of a step", accuracy.time_table(ledger.time), accuracy.time_rows(ledger.time)]
    if memory:
        parts += ["Memory of the rows", accuracy.memory_table(memory)]
    if time:
        parts += ["Time of the rows", accuracy.error_table(time)]
    if not parts:
        print(
            "None of these can be predicted. A prediction needs a model and an accelerator of `python3 -m tprimat models`, and a "
            f"run that completed {FEWEST_STEPS} steps or more; a CPU is not among them.",
            file=sys.stderr,
        )
        return 1
    print(markdown_as_text("\n\n".join(parts), screen_of(sys.stdout), drop=["group"]))
    return 0
