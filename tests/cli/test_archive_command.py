"""Results packed on one machine and read on another."""

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from commands import run_command
from runs.make_runs import a_run, step_times, steps_of, write_run

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"
SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyz012345"


def archive(*arguments, cwd=None):
    return run_command("archive", *arguments, cwd=cwd)


def compare(*arguments, cwd):
    return run_command("compare.py", "--results-dir", *arguments, cwd=cwd)


@pytest.fixture
def output(tmp_path):
    """An output folder as a training run leaves it, with things in it that nobody else may see."""
    folder = tmp_path / "output"
    shutil.copytree(RUNS / "h100", folder)
    words = ("./benchmark.py", "--set", "data=text:/scratch/apollo/book.txt", "--set", f"data.token={SECRET}")
    run = a_run("told", strategy="balanced", command=words)
    write_run(folder, run, steps_of(run, step_times(4.2, 5), 5))
    (folder / "training_llama.log").write_text(f"HF_TOKEN={SECRET}\n")
    return folder


def test_another_machine_compares_the_archive_as_it_is(output, tmp_path):
    command = [sys.executable, "-m", "tprimat", "archive", output, tmp_path / "out.tar.gz"]
    packed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert packed.returncode == 0, packed.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "out.tar.gz").rename(elsewhere / "out.tar.gz")
    from_archive = compare("out.tar.gz", "--output", "compare.md", cwd=elsewhere)
    from_folder = compare(output, "--output", "compare.md", cwd=tmp_path)
    assert from_archive.returncode == from_folder.returncode == 0
    of_folder = [line for line in from_folder.stdout.splitlines() if "tprimat explain" not in line]  # needs the run itself
    assert from_archive.stdout.splitlines() == of_folder
    against = compare("out.tar.gz", RUNS / "mi300x", "--baseline", "out.tar.gz", "--output", "compare.md", cwd=elsewhere)
    assert re.search(r"llama MI300X.* against out\.tar\.gz: llama H100", against.stdout)


def test_records_and_the_report_are_inside_and_nothing_private(output, tmp_path):
    archive(output, tmp_path / "out.tar.gz")
    with tarfile.open(tmp_path / "out.tar.gz") as packed:
        contents = {member.name: packed.extractfile(member).read().decode() for member in packed}
    assert {"report.html", "README.txt", "output/runs/told/run.json", "output/runs/told/steps.jsonl"} <= set(contents)
    assert not [name for name in contents if name.endswith((".log", "plan.json"))]
    for name, text in contents.items():
        for private in (SECRET, "apollo", str(tmp_path)):
            assert private not in text, name
    assert "text:[path][left out]" in contents["report.html"]


def test_a_damaged_file_and_a_folder_without_results_are_named_as_the_user_knows_them(output, tmp_path):
    (output / "runs" / "told" / "run.json").write_text("{")
    done = archive("output", "out.tar.gz", cwd=tmp_path)
    assert done.returncode == 1
    assert "skipped: output/runs/told/run.json is not a valid RunRecord.\n" in done.stderr
    (tmp_path / "empty").mkdir()
    nothing = archive("empty", "empty.tar.gz", cwd=tmp_path)
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("error: No result could be read.\n  at    empty\n")
    assert not (tmp_path / "empty.tar.gz").exists()
