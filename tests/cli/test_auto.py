"""--parallel auto on a machine whose NVML shows two H200 and whose torchtitan replays steps: the choice, and the race."""

import json
import os
from math import prod
from pathlib import Path

import numpy as np
import pytest
from commands import FAKE_PACKAGES, fake_nvml, run_command
from runs.make_runs import a_run, steps_of

from tprimat.analyze.groups import group_runs, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.records.benchmark_file import RunResult
from tprimat.runner.auto import RACE, Race, still_in
from tprimat.runner.combine import combined
from tprimat.runner.run import TrainingRun
from tprimat.runner.sweep import CellResult


@pytest.fixture
def machine(tmp_path, monkeypatch):
    for name in os.environ:
        if name.startswith(("SLURM_", "CUDA_", "NVIDIA_")):
            monkeypatch.delenv(name)

    def benchmark(*words, gpus=2):
        here = {"FAKE_GPUS": json.dumps([{}] * gpus), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(FAKE_PACKAGES)}
        asked = ("--engine", "torchtitan", "--model", "llama", "--parallel", "auto", "--global-batch-size", "16")
        with fake_nvml():
            return run_command("benchmark.py", *asked, *words, environment={**here, "OUTPUT_DIR": str(tmp_path / "out")})

    return benchmark


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
        (("--parallel", "auto:2", "--runs", "5"), "--parallel auto:2 runs each layout 3 times at most."),
        (("--parallel", "auto:2", "--set", "routing=natural,balanced"), "--parallel auto:2 ranks layouts under one routing."),
        (("--scaling", "1,2"), "--parallel auto chooses one layout, and --scaling runs many configurations."),
        (("--sweep", "seed=1,2"), "--parallel auto chooses one layout, and --sweep runs many configurations."),
    ):
        done = machine(*words)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    here = run_command("benchmark.py", "--parallel", "auto", "--model", "llama")
    assert (here.returncode, "--parallel auto cannot choose here." in here.stderr) == (2, True)
    absent = run_command("benchmark.py", "--parallel", "auto", "--platform", "amd", "--dry-run")
    assert "There is no GPU here to predict for." in absent.stderr


def test_a_job_chooses_where_it_runs(machine):
    words = ("--nodes", "2", "--parallel", "auto:3", "--set", "cluster.slurm.array_tasks=4", "--model", "llama,qwen")
    done = machine("--launcher", "slurm", "--platform", "nvidia", "--engine", "megatron", *words, "--dry-run")
    assert done.returncode == 0, done.stderr
    (command,) = (line for line in done.stdout.splitlines() if line.startswith("exec "))
    assert "--model llama,qwen --parallel auto:3 " in command
    assert "--tp" not in command
    assert command.endswith(" --resume")


class Named:
    """A contender with a plan of one strategy."""

    def __init__(self, strategy, model="llama"):
        self.name, self.model = strategy, model
        plan = type("Plan", (), {"strategy": strategy, "model": model})()
        self.session = type("Session", (), {"plans": (plan,)})()


def runs_of(strategy, mean, place, count=2, **fields):
    for number in range(count):
        run = a_run(f"{strategy}-{number}", strategy=strategy, **fields)
        noise = np.random.default_rng(10 * place + number)
        seconds = mean * (1 + 0.01 * noise.normal()) * (1 + 0.005 * noise.normal(size=30))
        steps = tuple(steps_of(run, seconds, seed=number))
        yield measure(RunResult(path=Path(strategy), run=run, steps=steps), MetricOptions())


def groups_of(**means):
    found = [run for place, (strategy, mean) in enumerate(means.items()) for run in runs_of(strategy, mean, place)]
    return {group.run.strategy: group for group in group_runs(found)}


def result_of(item):
    fields = {"record": item.result.run, "steps": item.result.steps, "metrics": item.metrics, "unmeasured": None}
    return CellResult(cell=None, run=TrainingRun(**fields, benchmark_file=item.result.path, log=item.result.path))


def test_only_what_can_no_longer_win_is_dropped():
    contenders = [Named("fast"), Named("near"), Named("slow"), Named("failed")]
    stay, dropped = still_in(contenders, groups_of(fast=5.0, near=5.01, slow=7.5))
    assert [one.name for one in stay] == ["fast", "near"]
    reasons = {one.name: why for one, why in dropped}
    assert reasons["failed"] == "it has no run that counts"
    assert "slower than" in reasons["slow"]
    assert set(reasons) == {"failed", "slow"}


def test_the_conclusion_names_a_fastest_layout_only_where_the_table_does():
    contenders = [Named("first"), Named("second")]
    for seconds, said, runs in (
        ((5.0, 5.01), "auto: llama: No winner: ", 3),
        ((5.0, 7.5), "auto: first is the fastest measured of llama; it was predicted as number 1", 3),
        ((5.0, 7.5), "too few runs to call it the winner. first was predicted as number 1", 2),
    ):
        pairs = zip(contenders, seconds, strict=True)
        results = [
            result_of(item) for place, (one, mean) in enumerate(pairs) for item in runs_of(one.name, mean, place, count=runs)
        ]
        conclusion = Race(contenders, print).conclusion(results)
        assert said in conclusion
        table = combined([result.run for result in results], question=RACE)
        assert ("fastest measured" in conclusion) == ("first is fastest" in table)
    alone = Race(contenders, print).conclusion([result_of(item) for item in runs_of("second", 5.0, 0)])
    assert alone.startswith("auto: llama: second alone has runs that count. second was predicted as number 2")


def test_layouts_race_against_those_of_their_own_model():
    means = {("llama", "one"): 5.0, ("llama", "other"): 5.01, ("qwen", "one"): 9.0, ("qwen", "other"): 5.5}
    notices = []
    race = Race([Named(name, model) for model, name in means], notices.append)
    runs = [runs_of(name, means[model, name], place, model=model) for place, (model, name) in enumerate(means)]
    results = [result_of(item) for pair in runs for item in pair]
    assert [cell.is_needless(results) for cell in race.cells()] == [False, False, True, True]
    assert len(notices) == 1
    assert notices[0].startswith("qwen: one can no longer win: ")
