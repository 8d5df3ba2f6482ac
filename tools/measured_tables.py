#!/usr/bin/env python3
"""Write the tables of docs/measured.md from the records; with --check, only report whether they are up to date.

python3 tools/measured_tables.py
python3 tools/measured_tables.py --check

A table stands between <!-- table ARGUMENTS --> and <!-- end -->, where ARGUMENTS follow ./compare.py --results-dir.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from page import page_parser, replace_blocks, update_page

ROOT = Path(__file__).resolve().parent.parent


def table(arguments: str) -> str:
    """Return compare.py's table of some folders, without the verdicts that follow it."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "table.md"
        command = [sys.executable, "compare.py", "--results-dir", *arguments.split(), "--output", str(output)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return output.read_text(encoding="utf8").split("\n\n")[0] + "\n"


def main() -> int:
    """Exit status: 0, or 1 where --check finds a difference."""
    options = page_parser(__doc__).parse_args()
    page = ROOT / "docs" / "measured.md"
    text = replace_blocks(page.read_text(encoding="utf8"), "table", table)
    return update_page(page, text, check=options.check, command="python3 tools/measured_tables.py")


if __name__ == "__main__":
    sys.exit(main())
