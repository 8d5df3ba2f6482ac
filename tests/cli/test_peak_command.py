"""analyze_peak_throughput.py as a user starts it: real processes, real files."""

import json
import shutil
from pathlib import Path

import pytest
from commands import run_command

from tprimat.records.schema import TelemetrySample
from tprimat.records.store import RunDirectory

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"


def analyze(*arguments, cwd):
    return run_command("analyze_peak_throughput.py", *arguments, cwd=cwd)


def test_runs_behind_published_peaks_are_counted_honestly_and_as_they_were_published(tmp_path):
    done = analyze("--results-dir", RUNS / "published", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for figure in ("87,933 tokens/s", "7,597,433,417 tokens", "3,709,684 samples of 2,048 tokens", "14.91 s", "703,466", "43.5"):
        assert figure in done.stdout
    as_published = ("--results-dir", RUNS / "published", "--set", "flops=6n", "--set", "peak=sparse")
    assert "22.8 %" in analyze(*as_published, cwd=tmp_path).stdout
    on_cpu = ("--results-dir", RUNS / "cpu", *as_published[2:])
    asked = (as_published, as_published[:2], (*on_cpu[:2], *as_published[1:]), on_cpu)
    compared = [run_command("compare.py", *words, cwd=tmp_path).stdout for words in asked]
    assert ["FLOP counted 6n; MFU is of the sparse peak." in text for text in compared] == [True, False, True, False]
    assert "MFU is of" not in compared[3], "a CPU has none"


def test_unlike_work_is_named_and_no_winner_is_paired_across_models(tmp_path):
    out = analyze("--results-dir", RUNS / "published", cwd=tmp_path).stdout
    assert "Not compared: llama MI300X against llama H100 SXM" in out
    assert "qwen MI300X against llama" not in out


def test_runs_that_do_not_count_stand_apart_with_their_cause(tmp_path):
    shutil.copytree(RUNS / "h100", tmp_path / "output")
    file = tmp_path / "output" / "runs" / "h100-qwen-0" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mismatches": ["asked for fp8, ran bf16"]}))
    done = analyze("--show-all", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    counted, apart = done.stdout.split("Not counted\n")
    assert "h100-qwen-oom: out of memory: CUDA out of memory on rank 3" in apart
    assert "asked for fp8, ran bf16" in apart
    assert "qwen" not in counted.split("All configurations")[1].split("More nodes")[0]


def test_results_are_looked_for_in_the_usual_places_and_the_summary_holds_every_configuration(tmp_path):
    shutil.copytree(RUNS / "mi300x", tmp_path / "output-00")
    shutil.copytree(RUNS / "h100", tmp_path / "all_outputs" / "01-output")
    done = analyze(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "8 x MI300X" in done.stdout
    assert "8 x H100 SXM" in done.stdout
    assert "memory_optimized" not in done.stdout
    assert "(1 more configuration: --show-all)" in done.stdout
    assert "memory_optimized" in (tmp_path / "peak_throughput_summary.txt").read_text()


def test_energy_and_configured_prices_become_columns(tmp_path):
    shutil.copytree(RUNS / "mi300x" / "runs" / "mi300x-llama-0", tmp_path / "output" / "runs" / "r0")
    place = RunDirectory(tmp_path / "output" / "runs" / "r0")
    for second in range(0, 240, 2):
        for gpu in range(8):
            place.append_telemetry(TelemetrySample(at_seconds=float(second), gpu=gpu, power_watts=700.0))
    (tmp_path / "config.yaml").write_text(
        (ROOT / "config.yaml").read_text().replace("cloud_costs: {}", "cloud_costs: {AMD Instinct MI300X: 2.0}")
    )
    done = analyze("--json", cwd=tmp_path)
    (peak,) = json.loads(done.stdout)["peaks"]
    assert peak["joules_per_token"] == pytest.approx(700 / peak["tokens_per_second_per_gpu"])
    assert peak["cost_per_million_tokens"] == pytest.approx(2.0 / 3600 / peak["tokens_per_second_per_gpu"] * 1e6)
    text = analyze(cwd=tmp_path).stdout
    assert "energy/token" in text
    assert "cost/M tokens" in text
