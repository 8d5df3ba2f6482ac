"""The accelerator suite, as a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tprimat.records.discover import load_results
from tprimat.records.store import read_probes

ALL_BUT_SHORT = "gemm,attention,collectives,ddp,transformer,finetune"
ALL_BUT_TRAINING = "gemm,attention,collectives,ddp,transformer,mlp,torchtune"


def suite(*arguments):
    command = [sys.executable, "-m", "tprimat.cli.suite", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def processes_of(folder):
    """Those that have the folder in their command line."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def until(condition, seconds=200):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.05)


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


def test_a_suite_that_was_killed_goes_on_where_it_was_and_a_refusal_is_a_record(tmp_path):
    asked = ("--output", tmp_path, "--skip", ALL_BUT_TRAINING, "--train-steps", 3)
    command = [sys.executable, "-m", "tprimat.cli.suite", *map(str, asked)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        until(lambda: any(file.stat().st_size for file in tmp_path.rglob("steps.jsonl")))
        first.kill()
    until(lambda: not processes_of(tmp_path), 30)
    measured = read_probes(tmp_path / "probes.jsonl")
    done = suite(*asked)
    assert done.returncode == 0, done.stderr
    assert read_probes(tmp_path / "probes.jsonl") == measured
    runs = {result.run.matmul_dtype: result.run for result in load_results([tmp_path])[0] if result.run.outcome != "running"}
    assert runs["bf16"].counts
    assert (runs["fp8"].outcome, runs["fp8"].engine) == ("failed", "megatron")
    text = (tmp_path / "suite.md").read_text(encoding="utf8")
    assert "| embedded-full-bf16 | bf16 | 2 |" in text
    assert "- embedded-full-fp8: failed: fp8 cannot run on a CPU." in text


def test_a_suite_that_its_user_stops_keeps_what_it_measured_and_does_not_exit_0(tmp_path):
    command = [sys.executable, "-m", "tprimat.cli.suite", "--output", str(tmp_path), "--skip", ALL_BUT_SHORT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as first:
        until((tmp_path / "probes.jsonl").exists)
        os.killpg(first.pid, signal.SIGINT)
        out, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    assert out.strip() == str(tmp_path / "suite.md")
    assert err.splitlines()[-1] == "stopped: the same command goes on from here"
    assert "Traceback" not in err


def test_a_probe_that_does_not_exist_cannot_be_skipped(tmp_path):
    done = suite("--output", tmp_path, "--skip", "gem")
    assert done.returncode == 2
    assert "no probe 'gem'" in done.stderr


def test_a_page_without_records_is_refused(tmp_path):
    done = suite("--output", tmp_path, "--page-only")
    assert done.returncode == 2
    assert "holds no measurement" in done.stderr
    assert "Traceback" not in done.stderr
