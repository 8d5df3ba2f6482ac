"""The accelerator suite, as its own process."""

import os
import signal
import subprocess
import sys
import time

from commands import run_command

from tprimat.records.store import read_probes

ALL_BUT_SHORT = "gemm,attention,collectives,ddp,transformer"


def suite(*arguments):
    command = [sys.executable, "-m", "tprimat", "suite", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def until(condition, seconds=200):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "timed out"
        time.sleep(0.05)


def test_one_command_measures_writes_the_page_and_continues_where_it_stopped(tmp_path):
    spent = run_command("suite", "--output", tmp_path, "--skip", ALL_BUT_SHORT + ",memory", "--time-budget", 0)
    assert spent.returncode == 2
    assert "mlp: skipped, the time budget is spent" in spent.stderr
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
    assert "the host's clock" in text
    assert "device events" not in text, "a CPU has none"
    assert [record.small for record in later] == [True] * 4
    assert "## Memory" in text
    assert "## Three-layer network" in text


def test_a_suite_stopped_by_its_user_keeps_its_measurements_and_does_not_exit_0(tmp_path):
    command = [sys.executable, "-m", "tprimat", "suite", "--output", str(tmp_path), "--skip", ALL_BUT_SHORT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as first:
        until((tmp_path / "probes.jsonl").exists)
        os.killpg(first.pid, signal.SIGINT)
        out, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    assert out.strip() == str(tmp_path / "suite.md")
    assert err.splitlines()[-1] == "stopped; the same command continues from here"
    assert "Traceback" not in err


def test_a_probe_that_does_not_exist_cannot_be_skipped(tmp_path):
    done = run_command("suite", "--output", tmp_path, "--skip", "gem")
    assert done.returncode == 2
    assert "no probe 'gem'" in done.stderr


def test_a_page_without_records_is_refused(tmp_path):
    done = run_command("suite", "--output", tmp_path, "--page-only")
    assert done.returncode == 2
    assert "holds no measurement" in done.stderr
