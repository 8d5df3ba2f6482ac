"""benchmarks/results/peak.md holds the current output of its commands."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "benchmarks" / "results" / "peak.md"


def tables(*arguments):
    command = [sys.executable, ROOT / "tools" / "guide_tables.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_edited_table_is_found_and_restored(tmp_path):
    page = tmp_path / "page.md"
    block = re.search(r"<!-- from: [^>]*tprimat models [^>]*-->.*?<!-- end -->", GUIDE.read_text(), flags=re.DOTALL)[0]
    page.write_text(edited := re.sub(r"\d,\d{3},", "5,432,", block, count=1))
    assert edited != block
    assert tables(page, "--check").returncode == 1
    assert tables(page).returncode == 0
    assert page.read_text() == block


def test_a_command_that_fails_is_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- from: ./analyze_peak_throughput.py --results-dir nowhere -->\n<!-- end -->\n")
    done = tables(page)
    assert done.returncode == 1
    assert "nowhere ended with status 2" in done.stderr
