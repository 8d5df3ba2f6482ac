"""What the scripts that generate a page share: their command line, blocks between comments, and writing or checking."""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path


def page_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a command line with --check."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the page is not up to date")
    return parser


def replace_blocks(page: str, kind: str, make: Callable[[str], str]) -> str:
    """Replace what is between <!-- KIND ARGUMENT --> and <!-- end --> by what the argument makes."""
    block = re.compile(rf"(<!-- {kind} ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return block.sub(lambda match: f"{match[1]}{make(match[2])}{match[3]}", page)


def update_page(page: Path, text: str, *, check: bool, command: str) -> int:
    """Write a page, or only check it. Returns the exit status: 1 where a checked page differs."""
    if not check:
        page.write_text(text, encoding="utf8")
        return 0
    if page.is_file() and page.read_text(encoding="utf8") == text:
        return 0
    print(f"{page.name} does not match its records: run {command}", file=sys.stderr)
    return 1
