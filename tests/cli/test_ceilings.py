"""A run beside probes of its machine: compare.py shows its share of the measured ceiling, or says why it cannot."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tprimat.record.schema import Machine, ProbeRecord
from tprimat.record.store import append_probe

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests" / "runs" / "h100" / "runs" / "h100-llama-0"
RATE = 700e12


@pytest.fixture
def results(tmp_path):
    """One run that tells its driver and torch, and a matrix product of 700 TFLOP/s under the same."""
    folder = tmp_path / "results"
    shutil.copytree(RUN, folder / "runs" / RUN.name)
    file = folder / "runs" / RUN.name / "run.json"
    run = json.loads(file.read_text())
    run["machine"] |= {"driver": "580.1", "power_limit_watts": 700.0}
    run["software"] = {"torch": "2.11.0"}
    file.write_text(json.dumps(run))
    machine = Machine(
        platform="cuda",
        accelerator=run["machine"]["accelerator"],
        gpus_per_node=1,
        nodes=1,
        driver="580.1",
        power_limit_watts=700.0,
    )
    flop = 2 * 8192**3
    probe = ProbeRecord(
        kind="gemm",
        shape={"m": 8192, "k": 8192, "n": 8192},
        dtype="bf16",
        seconds=(flop / RATE,) * 10,
        flop=flop,
        machine=machine,
        software={"torch": "2.11.0"},
        started_at="2026-01-01T00:00:00+00:00",
    )
    append_probe(folder / "probes.jsonl", probe)
    return folder


def compare(folder):
    out = folder.parent / "comparison.json"
    command = [sys.executable, ROOT / "compare.py", "--results-dir", folder, "--output", out, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done, json.loads(out.read_text())["groups"][0]["runs"][0]["metrics"] if done.returncode == 0 else None


def test_a_run_is_shown_with_its_share_of_the_measured_product(results):
    done, metrics = compare(results)
    assert metrics["share_of_measured_gemm"] == pytest.approx(metrics["model_flops_per_second_per_gpu"]["value"] / RATE)
    assert "of measured matmul" in done.stdout
    assert "49.3 %" in done.stdout


def test_a_probe_from_before_a_driver_update_is_left_out_and_the_table_says_so(results):
    file = results / "probes.jsonl"
    file.write_text(file.read_text().replace("580.1", "570.9"))
    done, metrics = compare(results)
    assert metrics["share_of_measured_gemm"] is None
    assert "of measured matmul" not in done.stdout
    assert "under driver 570.9 are left out: the run was made under driver 580.1" in done.stdout


def test_damaged_probes_are_named_and_the_comparison_stands(results):
    file = results / "probes.jsonl"
    file.write_text("{broken\n" + file.read_text())
    done, _ = compare(results)
    assert "probes.jsonl" in done.stderr
    assert "Traceback" not in done.stderr
    assert "tokens/s/GPU" in done.stdout
