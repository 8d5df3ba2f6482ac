#!/usr/bin/env python3
"""Write the tables of docs/measured.md and docs/moe.md from the records; with --check, only report whether they are up to date.

python3 tools/measured_tables.py
python3 tools/measured_tables.py --check

A table stands between <!-- table ARGUMENTS --> and <!-- end -->, where ARGUMENTS follow ./compare.py --results-dir, or between
<!-- profile ARGUMENTS --> and <!-- end -->, where they follow `tprimat trace --markdown`.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from page import page_parser, replace_blocks, update_page  # noqa: E402

from tprimat.statistics import FEWEST_RUNS  # noqa: E402

PAGES = ("measured.md", "moe.md")


def table(arguments: str) -> str:
    """Return compare.py's table of some folders, without the verdicts that follow it."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "table.md"
        command = [sys.executable, "compare.py", "--results-dir", *arguments.split(), "--output", str(output)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return without_lone_intervals(output.read_text(encoding="utf8").split("\n\n")[0]) + "\n"


INTERVAL = re.compile(r" \[[^\]|]*\]")


def without_lone_intervals(markdown: str) -> str:
    """Drop the intervals of rows with fewer than FEWEST_RUNS runs: a reader would take them for those of the next run."""
    lines = markdown.splitlines()
    place = [cell.strip() for cell in lines[0].split("|")].index("runs")
    rows = [line if int(line.split("|")[place]) >= FEWEST_RUNS else INTERVAL.sub("", line) for line in lines[2:]]
    return "\n".join([*lines[:2], *rows])


def profile(arguments: str) -> str:
    """Return the table of what steps spend their time on."""
    command = [sys.executable, "-m", "tprimat", "trace", "--markdown", *arguments.split()]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip() + "\n"


def main() -> int:
    """Exit status: 0, or 1 where --check finds a difference."""
    options = page_parser(__doc__).parse_args()
    status = 0
    for name in PAGES:
        page = ROOT / "docs" / name
        text = replace_blocks(page.read_text(encoding="utf8"), "table", table)
        text = replace_blocks(text, "profile", profile)
        status |= update_page(page, text, check=options.check, command="python3 tools/measured_tables.py")
    return status


if __name__ == "__main__":
    sys.exit(main())
