"""Results packed on one machine and read on another, with real processes."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from runs.make_runs import a_run, step_times, steps_of, write_run

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"
SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyz012345"


def start(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def output(tmp_path):
    """An output folder as a training run leaves it, with things in it that nobody else may see."""
    folder = tmp_path / "output"
    shutil.copytree(RUNS / "h100", folder)
    home = f"{Path.home()}/texts"
    run = a_run(
        "told", strategy="balanced", command=("./benchmark.py", "--data", f"text:{home}", "--set", f"data.token={SECRET}")
    )
    write_run(folder, run, steps_of(run, step_times(4.2, 5), 5))
    log = f"{socket.gethostname()} says:\nHF_TOKEN={SECRET}\nsaving to {home}\nMASTER_ADDR=gpu-box-12\nrank 0 on gpu-box-12\n"
    (folder / "training_llama.log").write_text(log)
    return folder


def test_another_machine_compares_the_archive_as_it_is(output, tmp_path):
    packed = start("-m", "tprimat", "archive", output, tmp_path / "out.tar.gz")
    assert packed.returncode == 0, packed.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "out.tar.gz").rename(elsewhere / "out.tar.gz")
    from_archive = start(ROOT / "compare.py", "--results-dir", "out.tar.gz", "--format", "md", cwd=elsewhere)
    from_folder = start(ROOT / "compare.py", "--results-dir", output, "--format", "md", cwd=tmp_path)
    assert from_archive.returncode == from_folder.returncode == 0
    assert from_archive.stdout == from_folder.stdout
    against = start(
        ROOT / "compare.py", "--results-dir", "out.tar.gz", RUNS / "mi300x", "--baseline", "out.tar.gz", cwd=elsewhere
    )
    assert re.search(r"llama MI300X.* against out\.tar\.gz: llama H100", against.stdout)


def test_nothing_private_is_inside(output, tmp_path):
    start("-m", "tprimat", "archive", output, tmp_path / "out.tar.gz")
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        contents = {member.name: archive.extractfile(member).read().decode() for member in archive}
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
        start("-m", "tprimat", "archive", output, tmp_path / name / "out.tar.gz")
    assert (tmp_path / "a" / "out.tar.gz").read_bytes() == (tmp_path / "b" / "out.tar.gz").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["none", "x.tar.gz"], "none does not exist"), ([RUNS, "x.zip"], "x.zip is not the name of an archive")],
)
def test_mistakes_are_explained(tmp_path, arguments, told):
    done = start("-m", "tprimat", "archive", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_benchmark_command_reports_and_packs_what_lies_in_its_output_folder(output, tmp_path):
    done = start(ROOT / "benchmark.py", "--report", "--archive", "out.tar.gz", "--output-dir", output, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (output / "report.html").read_text().startswith("<!DOCTYPE html>")
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert "report.html" in archive.getnames()
