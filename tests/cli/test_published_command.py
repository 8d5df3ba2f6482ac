"""compare.py --published: neighbors, differences, and commands that work."""

from pathlib import Path

from commands import run_command

from tprimat.analyze.groups import group_runs
from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.published import nearest_published
from tprimat.runner.analysis import read_results

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"


def compare(*arguments, cwd):
    return run_command("compare.py", *arguments, cwd=cwd)


def test_the_nearest_stand_beside_ours_by_one_yardstick_with_what_differs_and_how_to_run_them(tmp_path):
    done = compare("--results-dir", RUNS / "h100", "--published", "--output", "c.md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("Published neighbors")[1].splitlines()
    ours = next(number for number, line in enumerate(lines) if line.startswith("llama H100 SXM minimal_communication"))
    nearest = lines[ours + 1]
    assert nearest.startswith("dgx-cloud-llama-3.1-8b-bf16")
    assert nearest.split()[-5:] == ["527.8", "53.3", "%", "0.65", "x"]
    assert "dgx-cloud-llama-3.1-8b-bf16 differs: sequence 2,048 here, 8,192 there; CP not stated here, 2 there" in done.stdout
    assert done.stdout.count("source  NVIDIA DGX Cloud") == 1


def test_rivals_on_chips_and_models_that_compute_alike_come_first():
    """H100 and H200 have the same peaks, Llama 3 and 3.1 8B the same layers; an accelerator that is not stated is another one."""
    records = ROOT / "benchmarks" / "records" / "h200" / "in-turn-two-gpus" / "megatron" / "dp_s8192_mbs1_fp8"
    (group,) = nearest_published(group_runs(read_results([records], MetricOptions(), {}).measured))
    nearest = [one.result.name for one in group.neighbors]
    assert nearest == ["torchtitan-llama-3.1-8b-float8", "dgx-cloud-llama-3.1-8b-fp8", "megatron-bridge-llama-3-8b-fp8"]
    assert {"model", "accelerator", "gradients"} <= {one.name for one in group.neighbors[2].differences}
