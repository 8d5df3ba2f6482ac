#!/usr/bin/env python3
"""Write the measured tables of README.md from the records in results/; with --check, only say whether they are up to date.

python3 tools/readme_tables.py
python3 tools/readme_tables.py --check
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKERS = re.compile(r"(<!-- table ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(results: str) -> str:
    """compare.py's table of a folder, without the verdicts that follow it."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "table.md"
        command = [sys.executable, "compare.py", "--results-dir", *results.split(), "--output", str(output)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return output.read_text(encoding="utf8").split("\n\n")[0] + "\n"


def main() -> int:
    """Returns: 1 if --check finds a table that differs from its records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf8")
    after = MARKERS.sub(lambda match: match[1] + table(match[2]) + match[3], before)
    if options.check:
        return 0 if before == after else 1
    readme.write_text(after, encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
