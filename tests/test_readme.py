"""README.md is short, and its pictures are small; tests/test_docs_for_users.py tries its commands and links."""

import re
import shlex
import subprocess
from pathlib import Path

from commands import run_command

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf8")


def test_the_readme_is_short():
    assert len(README.splitlines()) < 150


def test_the_demo_answers_from_records_without_training(tmp_path):
    lines = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    commands = [shlex.split(line.replace("demo/", f"{tmp_path}/")) for line in lines if " --output demo/" in line]
    compared, reported = (run_command(*words[1:] if words[1] == "compare.py" else words[3:]) for words in commands)
    assert "H200 SXM dp_mbs4 is fastest: " in compared.stdout
    assert reported.returncode == 0, reported.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"comparison.png", "report.html"}


def test_the_pictures_are_small():
    shown = re.findall(r"!\[[^]]+\]\((\S+\.(?:png|svg))\)", README)
    assert shown == [f"docs/images/{name}" for name in ("comparison.png", "waterfall.svg", "report.png")]
    assert all((ROOT / path).stat().st_size < 200_000 for path in shown)


def test_the_records_that_prove_a_row_exist():
    named = set(re.findall(r"`(h[12]00/[\w-]+)`", README))
    assert len(named) >= 10
    assert [name for name in sorted(named) if not (ROOT / "benchmarks" / "records" / name).is_dir()] == []
