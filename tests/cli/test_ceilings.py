"""A run beside probes of its machine: every command shows its share of the measured ceiling, or says why it cannot."""

import html
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run_command, words_in

from tprimat.records.schema import Machine, ProbeRecord
from tprimat.records.store import append_probe

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests" / "runs" / "h100" / "runs" / "h100-llama-0"
RATE = 700e12
SHARE = "49.3 %"
FLOP = 2 * 8192**3
MACHINE = Machine(
    platform="cuda", accelerator="NVIDIA H100 80GB HBM3", gpus_per_node=1, nodes=1, driver="580.1", power_limit_watts=700.0
)
PROBE = ProbeRecord(
    kind="gemm",
    shape={"m": 8192, "k": 8192, "n": 8192},
    dtype="bf16",
    seconds=(FLOP / RATE,) * 10,
    flop=FLOP,
    machine=MACHINE,
    software={"torch": "2.11.0"},
    started_at="2026-01-01T00:00:00+00:00",
)
STALE = {
    "driver": replace(PROBE, machine=replace(MACHINE, driver="570.9")),
    "torch": replace(PROBE, software={"torch": "2.10.0"}),
    "power limit": replace(PROBE, machine=replace(MACHINE, power_limit_watts=600.0)),
}


@pytest.fixture
def results(tmp_path):
    """One run that tells its driver, torch and power limit, and a matrix product of 700 TFLOP/s under the same."""
    folder = tmp_path / "results"
    shutil.copytree(RUN, folder / "runs" / RUN.name)
    file = folder / "runs" / RUN.name / "run.json"
    run = json.loads(file.read_text())
    run["machine"] |= {"driver": "580.1", "power_limit_watts": 700.0}
    run["software"] = {"torch": "2.11.0"}
    file.write_text(json.dumps(run))
    append_probe(folder / "probes.jsonl", PROBE)
    return folder


def command(program, *arguments, cwd, **variables):
    return run_command(program, *arguments, cwd=cwd, environment=variables)


def compare(folder, *arguments):
    out = folder.parent / "comparison.json"
    done = command("compare.py", "--results-dir", folder, "--output", out, *arguments, cwd=folder.parent)
    return done, json.loads(out.read_text())["groups"][0]["runs"][0]["metrics"] if done.returncode == 0 else None


def texts_of(folder):
    """Door -> what it says about the results in a folder."""
    there = folder.parent
    said = {"compare.py": compare(folder)[0].stdout}
    said["analyze_peak_throughput.py"] = command("analyze_peak_throughput.py", "--results-dir", folder, cwd=there).stdout
    command("report", folder, "--output", folder / "report.html", cwd=there)
    said["report"] = html.unescape((folder / "report.html").read_text(encoding="utf8"))
    return said


def pictures_of(folder):
    """Door -> the words in its picture of the results in a folder."""
    there = folder.parent
    command("compare.py", "--results-dir", folder, "--output", there / "compare.svg", cwd=there)
    command("visualize_peak_throughput.py", "--results-dir", folder, "--output", there / "peak.svg", cwd=there)
    return {name: " ".join(words_in(there / name)) for name in ("compare.svg", "peak.svg")}


def test_every_command_shows_the_share_of_the_measured_product(results):
    done, metrics = compare(results)
    assert metrics["share_of_measured_gemm"] == pytest.approx(metrics["model_flops_per_second_per_gpu"]["value"] / RATE)
    assert metrics["measured_gemm_flops"] == pytest.approx(RATE)
    assert "of measured matmul" in done.stdout
    for name, said in (texts_of(results) | pictures_of(results)).items():
        assert SHARE in said, name
    peak = json.loads(command("analyze_peak_throughput.py", "--results-dir", results, "--json", cwd=results.parent).stdout)
    assert peak["peaks"][0]["share_of_measured_gemm"] == pytest.approx(metrics["share_of_measured_gemm"])


@pytest.mark.parametrize("reason", STALE)
def test_probes_of_another_driver_torch_or_power_limit_are_left_out(results, reason):
    (results / "probes.jsonl").unlink()
    append_probe(results / "probes.jsonl", STALE[reason])
    assert compare(results)[1]["share_of_measured_gemm"] is None


@pytest.mark.parametrize("place", ["a folder above", "its run folder", "another folder", "its file"])
def test_probes_are_found_where_a_user_leaves_them(results, tmp_path, place):
    named = {"another folder": [tmp_path / "elsewhere"], "its file": [tmp_path / "elsewhere" / "probes.jsonl"]}.get(place, [])
    if named:
        (tmp_path / "elsewhere").mkdir()
        (results / "probes.jsonl").rename(tmp_path / "elsewhere" / "probes.jsonl")
    asked = {"a folder above": tmp_path, "its run folder": results / "runs" / RUN.name}.get(place, results)
    out = tmp_path / "found.md"
    done = command(
        "compare.py", "--results-dir", asked, *(["--set", f"probes={named[0]}"] if named else []), "--output", out, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert SHARE in out.read_text(encoding="utf8")
