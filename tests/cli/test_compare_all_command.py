"""compare_all_configs.sh on folders as a sweep leaves them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_command

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"


def compare_all(folder, *arguments):
    return run_command("compare_all_configs.sh", *arguments, cwd=folder)


def compare_all_as_a_process(folder, *arguments):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [ROOT / "compare_all_configs.sh", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def sweep(tmp_path):
    for number, source in enumerate(("h100", "mi300x")):
        shutil.copytree(RUNS / source, tmp_path / f"output-0{number}")
    return tmp_path


def test_each_folder_gets_its_picture_and_the_summary_comes_from_the_records(sweep):
    done = compare_all_as_a_process(sweep)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (sweep / "all_outputs").iterdir()) == ["compare-00.png", "compare-01.png"]
    table = done.stdout.partition("configurations\n")[2].splitlines()
    assert len(table) == 2 + 6 + 3
    assert len(table[1]) <= 120
    (split,) = (row for row in table if "memory_optimized" in row)
    assert split.split()[:6] == ["output-00", "llama", "memory_optimized", "TP4", "PP2", "DP1"]
    (failed,) = (row for row in table if "out_of_memory" in row)
    assert failed.endswith("–")


def test_pictures_go_where_the_user_says(sweep):
    compare_all(sweep, "elsewhere")
    assert (sweep / "elsewhere" / "compare-01.png").exists()


def test_a_folder_without_a_result_is_named_and_the_others_are_drawn(sweep):
    (sweep / "output-02").mkdir()
    done = compare_all(sweep)
    assert done.returncode == 1
    assert "No result could be read." in done.stderr
    assert "output-02" in done.stderr
    assert (sweep / "all_outputs" / "compare-01.png").exists()


def test_without_a_sweep_it_says_how_to_make_one(tmp_path):
    done = compare_all(tmp_path)
    assert done.returncode == 2
    assert "./run_all_configs.sh" in done.stderr
