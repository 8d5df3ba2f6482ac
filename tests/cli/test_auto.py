"""--parallel auto on a machine whose NVML shows two H200 and whose torchtitan replays steps: the choice."""

import json
from math import prod

import pytest
from commands import TWO_GPUS, benchmark_on, run_command


@pytest.fixture
def machine(tmp_path, monkeypatch):
    asked = ("--engine", "torchtitan", "--model", "llama", "--parallel", "auto", "--global-batch-size", "16")
    return benchmark_on(monkeypatch, *asked, **TWO_GPUS, OUTPUT_DIR=str(tmp_path / "out"))


def test_the_fastest_layout_by_prediction_is_planned(machine):
    done = machine("--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads(done.stdout)["plans"]
    degrees = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")
    assert prod(plan["workload"][degree] for degree in degrees) == 2
    assert plan["workload"]["micro_batch_sequences"] > 1
    assert plan["prediction"]["step_seconds"] > 0


def test_what_contradicts_auto_is_explained(machine):
    for words, said in (
        (("--tp", "2"), "--parallel auto chooses --tp itself."),
        (("--micro-batch-size", "2"), "--parallel auto chooses --micro-batch-size itself."),
        (("--tp", "2", "--launcher", "slurm"), "--parallel auto chooses --tp itself."),
        (("--parallel", "auto:1"), "--parallel is 'auto:1'."),
        (("--parallel", "auto:2", "--runs", "5"), "--parallel auto:2 runs each layout 3 times."),
        (("--sweep", "seed=1,2"), "--parallel auto chooses one layout, and --sweep runs many configurations."),
    ):
        done = machine(*words)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    here = run_command("benchmark.py", "--parallel", "auto", "--model", "llama")
    assert (here.returncode, "--parallel auto cannot choose here." in here.stderr) == (2, True)
    absent = run_command("benchmark.py", "--parallel", "auto", "--platform", "amd", "--dry-run")
    assert "There is no GPU here to predict for." in absent.stderr


def test_a_job_chooses_where_it_runs(machine):
    words = ("--nodes", "2", "--parallel", "auto:3", "--model", "llama,qwen")
    done = machine("--launcher", "slurm", "--platform", "nvidia", "--engine", "megatron", *words, "--dry-run")
    assert done.returncode == 0, done.stderr
    (command,) = (line for line in done.stdout.splitlines() if line.startswith("exec "))
    assert "--parallel auto:3 --model llama,qwen " in command
    assert "--tp" not in command
    assert command.endswith(" --resume")


def test_the_first_layouts_by_prediction_are_measured_three_times_each(machine):
    done = machine("--parallel", "auto:2", "--dry-run", FAKE_GPUS="[{}, {}, {}, {}]")
    assert done.returncode == 0, done.stderr
    names = [line.rpartition(" ")[2] for line in done.stdout.splitlines() if line.startswith("Using parallelism strategy")]
    assert (len(names), len(set(names))) == (2, 2)
    workloads = [line for line in done.stdout.splitlines() if line.startswith("Workload: 12 steps of 16 x ")]
    assert [line.rpartition(", ")[2] for line in workloads] == ["3 runs", "3 runs"]
