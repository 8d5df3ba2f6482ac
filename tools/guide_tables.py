"""Regenerate the tables of a page from the commands named above them.

python3 tools/guide_tables.py                     benchmarks/results/peak.md
python3 tools/guide_tables.py --check             exit with status 1 if a table differs from what its command prints

A table is enclosed by two comments. The first holds the command and, after a bar, the section of the command's output:

    <!-- from: ./analyze_peak_throughput.py --results-dir benchmarks/records/h200/engine | Peak by platform and model -->
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
    """Run a command in a temporary folder, so that it leaves no files in the project, and return what it prints."""
    words = shlex.split(command)
    program = [sys.executable, *(words[1:] if words[0] == "python3" else [str(ROOT / words[0]), *words[1:]])]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("benchmarks", "tests"):
            Path(folder, name).symlink_to(ROOT / name)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        completed = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise SystemExit(f"{command} ended with status {completed.returncode}:\n{completed.stderr}")
    return completed.stdout


def section(text: str, title: str | None) -> str:
    """Return the lines between an underlined title and the next one."""
    if title is None:
        return text.strip("\n")
    parts = re.split(r"^(.+)\n=+\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    if title not in sections:
        raise SystemExit(f"There is no section {title!r}, only {', '.join(sections)}.")
    return sections[title].strip("\n")


def regenerated(page: str) -> str:
    """Return the page with every table regenerated."""

    def block(match: re.Match[str]) -> str:
        body = section(output(match["command"]), match["section"])
        return f"{match[1]}\n```text\n{body}\n```\n\n{match[4]}"

    return BLOCK.sub(block, page)


def main() -> int:
    """Return the exit status: 0, or 1 if --check found a table that is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, default=ROOT / "benchmarks" / "results" / "peak.md")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    page = options.page.read_text(encoding="utf8")
    fresh = regenerated(page)
    if options.check and fresh != page:
        print(f"{options.page.name} differs from what its commands print; run python3 tools/guide_tables.py", file=sys.stderr)
        return 1
    if not options.check:
        options.page.write_text(fresh, encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
