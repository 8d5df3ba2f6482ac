"""compare.py --published: neighbours, differences, and commands that work."""

from pathlib import Path

import pytest
from commands import run_command

from tprimat.analyze.groups import group_runs
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.published import nearest_published
from tprimat.core.accelerators import BACKEND_OF
from tprimat.core.published import results
from tprimat.runner.analysis import command, read_results, refusal, reproduce

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"
BY_NAME = {result.name: result for result in results()}


def compare(*arguments, cwd):
    return run_command("compare.py", *arguments, cwd=cwd)


def test_the_nearest_stand_beside_ours_by_one_yardstick_with_what_differs_and_how_to_run_them(tmp_path):
    done = compare("--results-dir", RUNS / "h100", "--published", "--output", "c.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("Published neighbours")[1].splitlines()
    ours = next(number for number, line in enumerate(lines) if line.startswith("llama H100 SXM minimal_communication"))
    nearest, broken = lines[ours + 1 : ours + 3]
    assert nearest.startswith("tprimat-h100-llama")
    assert "355.0 TFLOP/s" in nearest
    assert broken.split() == ["6n,", "MFU", "17.9", "%"], "text breaks before a table is wider than 120 columns"
    assert nearest.split()[-5:] == ["345.0", "34.9", "%", "1.00", "x"]
    assert "dgx-cloud-llama-3.1-8b-bf16 differs: sequence 2,048 here, 8,192 there; CP not stated here, 2 there" in done.stdout
    assert done.stdout.count("source  NVIDIA DGX Cloud") == 1
    assert "--sequence-length 8192 --micro-batch-size 1 --global-batch-size 128 --precision bf16" in done.stdout


def test_rivals_on_chips_and_models_that_compute_alike_come_first():
    """H100 and H200 have the same peaks, Llama 3 and 3.1 8B the same layers; an accelerator that is not stated is another one."""
    records = ROOT / "benchmarks" / "records" / "h200" / "in-turn-two-gpus" / "megatron" / "dp_s8192_mbs1_fp8"
    (found,) = nearest_published(group_runs(read_results([records], MetricOptions(), {}).measured))
    nearest = [one.result.name for one in found.neighbours]
    assert nearest == ["dgx-cloud-llama-3.1-8b-fp8", "megatron-bridge-llama-3-8b-fp8", "torchtitan-llama-3.1-8b-h200-float8"]
    assert {"model", "accelerator", "gradients"} <= {one.name for one in found.neighbours[1].differences}


@pytest.mark.parametrize("platform", ["nvidia", "amd"])
@pytest.mark.parametrize("name", sorted(name for name, result in BY_NAME.items() if not refusal(result)))
def test_every_command_makes_a_plan_of_the_published_configuration(name, platform, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("NODE_RANK", "0")
    result = BY_NAME[name]
    words = command(result, BACKEND_OF[platform])
    if result.workload.matmul_dtype == "fp8":
        place = words.index("--engine")
        assert words[place + 1] == {"nvidia": "nemo", "amd": "primus"}[platform]
        # Neither engine is installed here, and the embedded one's fp8 is another: the rest of the plan is checked in bf16.
        words[words.index("fp8")] = "bf16"
        del words[place : place + 2]
    done = run_command("benchmark.py", *words[1:], "--platform", platform, "--engine", "megatron", "--dry-run")
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert f"({result.shape})" in out
    asked = result.workload
    if asked.sequence_tokens and asked.global_batch_sequences:
        assert f"{asked.global_batch_sequences} x {asked.sequence_tokens} tokens" in out
    assert f"TP={asked.tensor_parallel or 1}, PP={asked.pipeline_parallel or 1}," in out


def test_what_cannot_be_run_here_says_why_instead_of_a_command_that_fails():
    reasons = {name: refusal(result) for name, result in BY_NAME.items() if refusal(result)}
    assert "the shape of its model" in reasons["llm-foundry-mpt-7b"]
    assert reasons["llama-3.1-405b-16k-gpus"] == "its 126 layers do not make 16 equal pipeline stages"
    assert len(reasons) < len(BY_NAME) / 2
    assert reproduce(BY_NAME["llm-foundry-mpt-7b"], "cuda").startswith("– (")
