"""Each page and picture that a script makes holds what its records give."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = (
    "tools/measured_tables.py",
    "tools/performance_page.py",
    "tools/h200_page.py",
    "tools/statistics_page.py",
    "tools/reliability_page.py",
    "tools/guide_tables.py",
    "tools/guide_tables.py README.md",
    "tools/readme_pictures.py",
    "tools/explain_page.py",
    "benchmarks/accuracy.py",
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_the_script_makes_is_up_to_date(script):
    done = subprocess.run([sys.executable, *script.split(), "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_page_of_results_has_its_script():
    named = "".join((ROOT / script.split()[0]).read_text(encoding="utf8") for script in SCRIPTS)
    assert [page.name for page in (ROOT / "benchmarks" / "results").glob("*.md") if f'"{page.name}"' not in named] == []
