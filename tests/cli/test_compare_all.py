"""compare_all_configs.sh on folders as a sweep leaves them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"


def compare_all(folder, *arguments):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [ROOT / "compare_all_configs.sh", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def sweep(tmp_path):
    for number, source in enumerate(("h100", "mi300x")):
        shutil.copytree(RUNS / source, tmp_path / f"output-0{number}")
    (tmp_path / "output-02").mkdir()
    return tmp_path


def test_each_folder_gets_its_picture_and_one_without_a_result_is_named(sweep):
    done = compare_all(sweep, "elsewhere")
    assert done.returncode == 1
    names = sorted(path.name for path in (sweep / "elsewhere").iterdir())
    assert names == ["compare-00.png", "compare-01.png", "compare-all.png"]
    assert done.stderr.count("No result could be read.") == 1
    assert "output-02" in done.stderr
    together = done.stdout.partition("all folders\n")[2]
    assert all(words in together for words in ("memory_optimized", "MI300X", "H100"))


def test_flags_go_to_each_comparison_and_a_gate_to_that_of_all(sweep):
    (sweep / "output-02").rmdir()
    done = compare_all(sweep, "--set", "warmup=20")
    assert (done.returncode, done.stderr.count("written: all_outputs/compare-")) == (0, 3)
    assert done.stdout.count("  20 ") >= 2, "of 40 steps"
    gate = compare_all(sweep, "elsewhere", "--baseline", "output-01", "--fail-if-slower", "3%")
    assert (gate.returncode, "gate: " in gate.stderr) == (1, True), gate.stderr
    assert [path.name for path in (sweep / "elsewhere").iterdir()] == ["compare-all.png"]


def test_without_a_sweep_it_says_how_to_make_one(tmp_path):
    done = compare_all(tmp_path)
    assert (done.returncode, "run_all_configs.sh" in done.stderr) == (2, True)
