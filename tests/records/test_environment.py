"""A record says which sources of this program made it."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ASK = "from tprimat.records.environment import software_versions; print(software_versions()['tprimat'])"


def version(folder):
    done = subprocess.run(
        [sys.executable, "-c", ASK], cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_version_changes_with_the_sources_and_with_nothing_else(tmp_path):
    for name in ("one", "other"):
        shutil.copytree(ROOT / "tprimat", tmp_path / name / "tprimat", ignore=shutil.ignore_patterns("__pycache__"))
    first = version(tmp_path / "one")
    assert first == version(tmp_path / "other") == version(ROOT)
    with (tmp_path / "other" / "tprimat" / "units.py").open("a") as file:
        file.write("# a change\n")
    changed = version(tmp_path / "other")
    assert changed != first
    assert changed.split("+")[0] == first.split("+")[0]
