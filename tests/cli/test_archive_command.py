"""Results packed on one machine and read on another."""

import os
import re
import shutil
import socket
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
    home = f"{Path.home()}/texts"
    run = a_run(
        "told", strategy="balanced", command=("./benchmark.py", "--set", f"data=text:{home}", "--set", f"data.token={SECRET}")
    )
    write_run(folder, run, steps_of(run, step_times(4.2, 5), 5))
    log = f"{socket.gethostname()} says:\nHF_TOKEN={SECRET}\nsaving to {home}\nMASTER_ADDR=gpu-box-12\nrank 0 on gpu-box-12\n"
    (folder / "training_llama.log").write_text(log)
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
    assert from_archive.stdout == from_folder.stdout
    against = compare("out.tar.gz", RUNS / "mi300x", "--baseline", "out.tar.gz", "--output", "compare.md", cwd=elsewhere)
    assert re.search(r"llama MI300X.* against out\.tar\.gz: llama H100", against.stdout)


def test_nothing_private_is_inside(output, tmp_path):
    archive(output, tmp_path / "out.tar.gz")
    with tarfile.open(tmp_path / "out.tar.gz") as packed:
        contents = {member.name: packed.extractfile(member).read().decode() for member in packed}
    assert {"report.html", "README.txt", "output/training_llama.log", "output/runs/told/run.json"} <= set(contents)
    for name, text in contents.items():
        assert SECRET not in text, name
        assert f"{Path.home()}/texts" not in text, name
        assert "gpu-box-12" not in text, name
        assert str(tmp_path) not in text, name
    assert contents["output/training_llama.log"].endswith(
        "HF_TOKEN=[secret]\nsaving to ~/texts\nMASTER_ADDR=[host]\nrank 0 on [host]\n"
    )
    assert "text:~/texts" in contents["report.html"]


def test_the_same_results_make_the_same_archive(output, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        archive(output, tmp_path / name / "out.tar.gz")
    assert (tmp_path / "a" / "out.tar.gz").read_bytes() == (tmp_path / "b" / "out.tar.gz").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["none", "x.tar.gz"], "none does not exist"),
        ([RUNS, "x.zip"], "  try   x.tar.gz\n"),
        ([RUNS, "x.tar"], "  try   x.tar.gz\n"),
        ([RUNS, "x.1"], "  try   x.1.tar.gz\n"),
    ],
)
def test_mistakes_are_explained(tmp_path, arguments, told):
    done = archive(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_target_below_a_file_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    done = archive(RUNS / "cpu", "file/x/x.tar.gz", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: file/x/x.tar.gz cannot be written: Not a directory.\n")


def test_a_damaged_file_and_a_folder_without_results_are_named_as_the_user_knows_them(output, tmp_path):
    (output / "runs" / "told" / "run.json").write_text("{")
    done = archive("output", "out.tar.gz", cwd=tmp_path)
    assert done.returncode == 1
    assert "skipped: out.tar.gz/output/runs/told/run.json is not a valid RunRecord.\n" in done.stderr
    (tmp_path / "empty").mkdir()
    nothing = archive("empty", "empty.tar.gz", cwd=tmp_path)
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("error: No result could be read.\n  at    empty\n")
    assert not (tmp_path / "empty.tar.gz").exists()


def test_no_room_for_temporary_files_is_explained(tmp_path):
    limited = ["prlimit", "--fsize=0", sys.executable, "-m", "tprimat", "archive", str(RUNS / "cpu"), "x.tar.gz"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(limited, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: No temporary folder can be written.\n"), done.stderr
    assert "TMPDIR" in done.stderr


def test_the_benchmark_command_reports_and_packs_what_lies_in_its_output_folder(output, tmp_path):
    done = run_command("benchmark.py", "--report", "--archive", "out.tar.gz", "--output-dir", output, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (output / "report.html").read_text().startswith("<!DOCTYPE html>")
    with tarfile.open(tmp_path / "out.tar.gz") as packed:
        assert "report.html" in packed.getnames()


@pytest.mark.parametrize("words", [["--report"], ["--archive", "out.tar.gz"]], ids=lambda words: words[0])
def test_a_dry_run_writes_neither_a_page_nor_an_archive(words, tmp_path):
    done = run_command("benchmark.py", "--dry-run", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert f"{words[0]} trains nothing: it shows results that exist." in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_archive_that_does_not_fit_into_the_temporary_folder_is_not_called_damaged(tmp_path):
    assert archive(RUNS / "cpu", "x.tar.gz", cwd=tmp_path).returncode == 0
    limited = ["prlimit", "--fsize=1024", sys.executable, "-m", "tprimat", "compare", "--results-dir", "x.tar.gz"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(limited, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "skipped: x.tar.gz does not fit into the temporary folder " in done.stderr, done.stderr
    assert "TMPDIR" in done.stderr
