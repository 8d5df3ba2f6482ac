"""The engine nemo before anything is started: what is missing is named, and the two lists of requirements agree."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tprimat.engines import choose, nemo
from tprimat.errors import LaunchError

ROOT = Path(__file__).parent.parent.parent


def test_the_message_names_what_nemo_lacks_here_and_how_to_install_it(monkeypatch):
    monkeypatch.setattr(nemo, "REQUIRED_MODULES", ("json", "no_such_module_a", "no_such_parent.part"))
    with pytest.raises(LaunchError) as caught:
        choose.choose("nemo", "nvidia")
    assert caught.value.what.startswith("The engine nemo needs no_such_module_a, no_such_parent.part, not installed for")
    assert "make nemo" in caught.value.fix


def test_auto_takes_nemo_on_nvidia_when_it_is_whole_and_says_what_it_lacks_otherwise(monkeypatch):
    monkeypatch.setattr(nemo, "REQUIRED_MODULES", ("json",))
    assert choose.choose("auto", "nvidia").engine == "nemo"
    assert choose.choose("auto", "cpu").engine == "megatron"
    monkeypatch.setattr(nemo, "REQUIRED_MODULES", ("json", "no_such_module"))
    choice = choose.choose("auto", "nvidia")
    assert choice.engine == "megatron"
    assert choice.reason == "NeMo needs no_such_module, not installed here"


def test_looking_for_nemo_imports_none_of_it():
    code = "import sys; from tprimat.engines import nemo; nemo.missing_parts(); print([m for m in HEAVY if m in sys.modules])"
    code = code.replace("HEAVY", "('torch', 'nemo', 'lightning')")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_extra_and_the_requirements_file_ask_for_the_same():
    listed = (ROOT / "requirements-nemo.txt").read_text(encoding="utf8").split("# What ./benchmark.py itself needs there.")[0]
    wanted = [line for line in listed.splitlines() if line and not line.startswith("#")]
    extra = re.search(r"^nemo = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf8"), re.MULTILINE)
    assert re.findall(r'"([^"]+)"', extra[1]) == wanted
