"""README.md is true: its tables match the records, its commands are accepted, its files exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tprimat.cli import run
from tprimat.cli.main import parser_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf8")
COMMANDS = [
    line.split("#")[0].strip() for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()
]
SCRIPTS = [command for command in COMMANDS if command.startswith(("./", "python3 tools/", "python3 -m tprimat"))]


def test_the_tables_match_the_records():
    done = subprocess.run([sys.executable, "tools/measured_tables.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "python3 tools/measured_tables.py"


@pytest.mark.parametrize("command", [command for command in SCRIPTS if command.startswith("./benchmark.py")])
def test_benchmark_accepts_the_commands_of_the_readme(command):
    parser_of(run, "benchmark.py").parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("command", SCRIPTS)
def test_every_script_of_the_readme_exists_and_has_help(command):
    words = shlex.split(command)
    start = [sys.executable, *words[1:4]] if words[0] == "python3" else [str(ROOT / words[0])]
    if words[0].endswith(".sh"):
        assert (ROOT / words[0]).stat().st_mode & 0o111
        return
    if words[0] != "python3":
        start = [sys.executable, *start]
    if words[0] == "python3" and words[1] != "-m":
        start = start[:2]
    done = subprocess.run([*start, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for flag in (word.split("=")[0] for word in words if word.startswith("--")):
        assert flag in done.stdout, f"{flag} is not a flag of {words[0]}"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)h][^)]*)\)", README))))
def test_every_link_of_the_readme_leads_somewhere(path):
    assert (ROOT / path).exists()


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_the_pictures_are_small_and_what_the_records_give():
    shown = re.findall(r"!\[[^]]+\]\((\S+\.png)\)", README)
    assert shown == ["docs/images/comparison.png", "docs/images/report.png"]
    assert all((ROOT / path).stat().st_size < 200_000 for path in shown)
    assert subprocess.run([sys.executable, ROOT / "tools" / "readme_pictures.py", "--check"], check=False).returncode == 0
