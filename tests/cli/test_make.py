"""What `make` says and would do; the installations themselves are how these tests came to run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf8")
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose environment has no package."""
    for name in ("Makefile", "constraints.txt", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")], check=True)
    return tmp_path


def make(folder, *words):
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout


def test_make_alone_prints_what_can_be_made_and_makes_nothing(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    said = make(tmp_path)
    targets = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    assert [name for name in targets if f"make {name} " not in said] == ["notice"]
    assert "TORCH=cpu" in said
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


def test_the_build_of_torch_is_one_variable(checkout):
    (version,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    commands = make(checkout, "--dry-run", "install", "TORCH=cpu")
    assert f"--extra-index-url https://download.pytorch.org/whl/cpu torch=={version}+cpu" in commands
    assert "index-url" not in make(checkout, "--dry-run", "install")
    assert "--quiet" not in commands, "minutes of silence"


def test_what_pip_would_fetch_is_said_before_it_does(checkout):
    said = make(checkout, "notice")
    if Path("/dev/nvidiactl").exists():
        assert said == ""
    else:
        assert "make benchmark TORCH=" in said
    assert make(checkout, "notice", "TORCH=cpu") == ""
