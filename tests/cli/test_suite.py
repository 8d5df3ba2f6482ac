"""The accelerator suite, as a process of its own."""

import subprocess
import sys

from tprimat.record.store import read_probes

ALL_BUT_SHORT = "gemm,attention,collectives,ddp,transformer"


def suite(*arguments):
    command = [sys.executable, "-m", "tprimat.cli.suite", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_one_command_measures_writes_the_page_and_goes_on_where_it_stopped(tmp_path):
    done = suite("--output", tmp_path, "--skip", ALL_BUT_SHORT + ",memory")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "suite.md")
    first = read_probes(tmp_path / "probes.jsonl")
    assert [record.kind for record in first] == ["mlp_step"]
    assert suite("--output", tmp_path, "--skip", ALL_BUT_SHORT).returncode == 0
    later = read_probes(tmp_path / "probes.jsonl")
    assert later[:1] == first
    assert sorted(record.kind for record in later[1:]) == ["copy", "fill", "triad"]
    text = (tmp_path / "suite.md").read_text(encoding="utf8")
    assert "## Memory" in text
    assert "## Three-layer network" in text
    assert "torchtune is not installed" in text


def test_a_probe_that_does_not_exist_cannot_be_skipped(tmp_path):
    done = suite("--output", tmp_path, "--skip", "gem")
    assert done.returncode == 2
    assert "no probe 'gem'" in done.stderr


def test_a_page_without_records_is_refused(tmp_path):
    done = suite("--output", tmp_path, "--page-only")
    assert done.returncode == 2
    assert "holds no measurement" in done.stderr
    assert "Traceback" not in done.stderr
