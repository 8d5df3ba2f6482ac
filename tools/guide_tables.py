"""Writes the tables of a page again from the commands that stand above them.

python3 tools/guide_tables.py                     PEAK_THROUGHPUT_GUIDE.md
python3 tools/guide_tables.py --check             exit status 1 where a table is not what its command prints

A table stands between two comments, the first of which holds the command and, after a bar, the section of its output:

    <!-- from: ./analyze_peak_throughput.py --results-dir results/h200/engine | Peak by platform and model -->
    <!-- end -->
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- from: (?P<command>[^|>]+?)(?: \| (?P<section>[^>]+?))? -->\n).*?(<!-- end -->)", re.DOTALL)


@cache
def output(command: str) -> str:
    """What a command prints, run where it can write its files without leaving them in the project."""
    words = shlex.split(command)
    program = [sys.executable, *(words[1:] if words[0] == "python3" else [str(ROOT / words[0]), *words[1:]])]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("results", "tests"):
            Path(folder, name).symlink_to(ROOT / name)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} ended with status {done.returncode}:\n{done.stderr}")
    return done.stdout


def section(text: str, title: str | None) -> str:
    """The lines below a title that is underlined, up to the next such title."""
    if title is None:
        return text.strip("\n")
    parts = re.split(r"^(.+)\n=+\n", text, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    if title not in found:
        raise SystemExit(f"There is no section {title!r}, only {', '.join(found)}.")
    return found[title].strip("\n")


def rewritten(page: str) -> str:
    """The page with every table made anew."""

    def block(match: re.Match[str]) -> str:
        body = section(output(match["command"]), match["section"])
        return f"{match[1]}\n```text\n{body}\n```\n\n{match[4]}"

    return BLOCK.sub(block, page)


def main() -> int:
    """Exit status: 0, or 1 where --check found a table that is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, default=ROOT / "PEAK_THROUGHPUT_GUIDE.md")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    page = options.page.read_text(encoding="utf8")
    fresh = rewritten(page)
    if options.check and fresh != page:
        print(f"{options.page.name} does not hold what its commands print: python3 tools/guide_tables.py", file=sys.stderr)
        return 1
    if not options.check:
        options.page.write_text(fresh, encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
