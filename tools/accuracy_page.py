#!/usr/bin/env python3
"""Write the tables of docs/accuracy.md from the committed records; with --check, only report differences.

python3 tools/accuracy_page.py
python3 tools/accuracy_page.py --check
"""

import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from page import page_parser, replace_blocks, update_page  # noqa: E402

from tprimat.core import units  # noqa: E402
from tprimat.predict.accuracy import Score, errors  # noqa: E402
from tprimat.predict.published import score_published  # noqa: E402
from tprimat.report import accuracy  # noqa: E402
from tprimat.runner.accuracy import LARGE_MODELS, Ledger, read_rows, score_records, score_rows  # noqa: E402

PAGE = ROOT / "docs" / "accuracy.md"
RECORDS = ROOT / "benchmarks" / "records"
MACHINES = (RECORDS / "h200", RECORDS / "h100")
PROBES = [folder for machine in MACHINES for folder in sorted(machine.glob("probes-*"))]
FOLDERS = [
    folder
    for machine in MACHINES
    for folder in sorted(machine.iterdir())
    if folder.is_dir() and folder.name != "unswitched" and folder not in PROBES
]
"""Of our records: not those whose sources were changed in ways that no record tells."""
GOLDENS = RECORDS / "megatron-goldens" / "rows.jsonl"
NOTEWORTHY = 0.1
"""Errors of rows that the page lists one by one."""


@cache
def ledger() -> Ledger:
    """Return the scores of our own records."""
    return score_records(FOLDERS, PROBES)


@cache
def golden_scores() -> tuple[list[Score], list[Score]]:
    """Return memory and time of Megatron-LM's tests."""
    memory, time, _ = score_rows(read_rows(GOLDENS))
    return memory, time


def large_goldens() -> list[Score]:
    """Return the rows over 4 GB."""
    return [score for score in golden_scores()[0] if score.group == "over 4 GB"]


def large_models() -> list[Score]:
    """Return the steps of models that keep a GPU busy."""
    return [score for score in golden_scores()[1] if score.group == LARGE_MODELS]


def headline() -> str:
    """Return the result in one paragraph."""
    found, golden = ledger(), large_goldens()
    memory = errors(score.error for score in found.memory)
    large = errors(score.error for score in golden)
    assert memory is not None
    assert large is not None
    percent = units.percent
    return (
        f"Memory is predicted with a mean error of {percent(memory.mean_absolute, 1)} on {memory.rows} configurations on H200 "
        f"and H100, {percent(memory.within_5, 0)} of them within 5 %,\n"
        f"and of {percent(large.mean_absolute, 1)} on {large.rows} rows of Megatron-LM's tests that allocate over 4 GB.\n"
    )


BLOCKS = {
    "headline": headline,
    "foretold": lambda: accuracy.foretold_rows(ledger().foretold),
    "memory": lambda: accuracy.memory_table(ledger().memory),
    "memory_rows": lambda: accuracy.memory_rows(ledger().memory),
    "time": lambda: accuracy.time_table(ledger().time),
    "time_rows": lambda: accuracy.time_rows(ledger().time),
    "time_published": lambda: accuracy.error_table(ledger().time_without_probes),
    "goldens": lambda: accuracy.memory_table(golden_scores()[0]),
    "goldens_worst": lambda: accuracy.worst_rows(large_goldens(), NOTEWORTHY),
    "goldens_time": lambda: accuracy.error_table(golden_scores()[1]),
    "goldens_time_rows": lambda: accuracy.worst_rows(large_models(), 0, units.seconds),
    "published": lambda: accuracy.rate_rows(score_published()),
    "choices": lambda: accuracy.choice_table(ledger().time),
}


def main() -> int:
    """Write the page, or check it."""
    options = page_parser(__doc__).parse_args()
    text = replace_blocks(PAGE.read_text(encoding="utf8"), "figures", lambda name: f"\n{BLOCKS[name]().rstrip()}\n\n")
    return update_page(PAGE, text, check=options.check, command="python3 tools/accuracy_page.py")


if __name__ == "__main__":
    sys.exit(main())
