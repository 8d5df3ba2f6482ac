"""README.md is short, and its pictures are small; tests/test_docs_for_users.py tries its commands and links."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf8")


def test_the_readme_is_short():
    assert len(README.splitlines()) < 150


def test_the_pictures_are_small():
    shown = re.findall(r"!\[[^]]+\]\((\S+\.png)\)", README)
    assert shown == ["docs/images/comparison.png", "docs/images/report.png"]
    assert all((ROOT / path).stat().st_size < 200_000 for path in shown)


def test_the_records_that_prove_a_row_exist():
    named = set(re.findall(r"`(h[12]00/[\w-]+)`", README))
    assert len(named) >= 10
    assert [name for name in sorted(named) if not (ROOT / "benchmarks" / "records" / name).is_dir()] == []
