"""The engine torchtitan: its command line and inputs, what it refuses, and runs of ./benchmark.py with a fake torchtitan."""

import json
import os
import re
from pathlib import Path

import pytest
from commands import FAKE_PACKAGES, TWO_GPUS, benchmark_on, only_run, run_script
from plans import request_of, short_settings

from tprimat.config.load import read_config
from tprimat.core.errors import LaunchError
from tprimat.engines.base import Here, choose
from tprimat.engines.torchtitan import ENGINE, arguments
from tprimat.plan.build import build_plan

ROOT = Path(__file__).parents[2]


def plan_of(*changes, model="llama", strategy="balanced", size="full", platform="nvidia", gpus=4):
    request = request_of(
        model, strategy, platform=platform, size=size, engine="torchtitan", gpus_found=gpus, output_directory="/results"
    )
    settings = short_settings(changes, model, strategy, platform)
    return build_plan(read_config(size=size, settings=settings, environment={}), request)


def place(*keys):
    return ".".join(keys)


def given(plan):
    """The arguments with a value, and the switches."""
    words = [word for word in arguments(plan) if word not in {"--compile.enable", "--job.print_config"}]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_torchtitan_gets_the_workload_of_the_plan():
    changes = ("training.duration.max_steps=7", "training.data.micro_batch_size=2", "training.optimizer.schedule=constant")
    plan = plan_of(*changes, "p.recompute=full")
    words = given(plan)
    assert (words["--training.global_batch_size"], words["--training.local_batch_size"]) == ("128", "2")
    assert (words["--training.seq_len"], words["--training.steps"], words["--model.flavor"]) == ("2048", "7", "8B")
    assert (words["--parallelism.tensor_parallel_degree"], words["--training.mixed_precision_param"]) == ("2", "bfloat16")
    assert (words["--activation_checkpoint.mode"], words["--debug.seed"]) == ("full", "1234")
    assert (words["--lr_scheduler.decay_type"], words["--lr_scheduler.min_lr_factor"]) == ("linear", "1.0")
    assert words["--lr_scheduler.warmup_steps"] == "6"
    assert arguments(plan)[-2:] == ("--compile.enable", "--job.print_config")


def test_it_is_started_by_torchrun_in_the_folder_of_its_inputs():
    command = ENGINE.command(plan_of("p.environment={NCCL_DEBUG: WARN}"))
    assert command.argv[:3] == ("--local-ranks-filter=0", "-m", "torchtitan.train")
    assert (command.ranks_per_node, command.directory) == (4, "/results/torchtitan")
    assert (command.environment["HF_HUB_OFFLINE"], command.environment["NCCL_DEBUG"]) == ("1", "WARN")
    assert {Path(name).parts[:3] for name in command.files} == {("/", "results", "torchtitan")}


def test_a_torchtitan_that_is_not_installed_is_named_with_the_way_to_get_it():
    with pytest.raises(LaunchError, match="torchtitan is not installed") as caught:
        choose("torchtitan", Here(platform="nvidia"))
    assert ".[torchtitan]" in caught.value.fix


TP4 = "parallelism.balanced.llama.nvidia={{tensor_model_parallel_size: 4{}}}"


@pytest.mark.parametrize(
    ("changes", "fields", "what"),
    [
        ([], {"platform": "cpu"}, "The engine torchtitan does not run on a CPU."),
        ([], {"size": "tiny"}, "The engine torchtitan trains the full model only."),
        ([], {"model": "qwen"}, "torchtitan cannot train qwen-2.5-7b."),
        (["hardware.platforms.nvidia.nodes=2"], {}, "The engine torchtitan is measured on one node only."),
        (
            ["parallelism.balanced.llama.nvidia={pipeline_model_parallel_size: 2}"],
            {},
            "torchtitan's pipeline divides a step differently.",
        ),
        (
            [TP4.format(", sequence_parallel: false")],
            {"gpus": 8},
            "torchtitan has no tensor parallelism without sequence parallelism.",
        ),
        ([TP4.format("")], {}, "torchtitan computes in fp32 with a single replica."),
        (["p.recompute=selective"], {}, "torchtitan has no recompute: selective like Megatron-Core's."),
        (["p.recompute=full", "p.recompute_layers=4"], {}, "torchtitan recomputes all layers, or none."),
        (["training.data.dataset=text:/a"], {}, "The engine torchtitan trains on mock data, not on text:/a."),
        (["profiling.enabled=true"], {}, "The engine torchtitan does not profile."),
        (["training.optimizer.gradient_clipping=0"], {}, "torchtitan always clips gradients."),
        (["o.optimizer_states=bf16"], {}, "optimizer_states is bf16."),
        (["o.gradients=bf16"], {}, "gradients is bf16."),
    ],
)
def test_what_torchtitan_cannot_do_is_refused_with_the_way_out(changes, fields, what):
    plan = plan_of(*changes, **fields)
    error = ENGINE.refusal(plan, place)
    assert error.what == what
    assert error.where
    assert error.fix


def test_the_extra_names_the_version_whose_arguments_these_are():
    extra = re.search(
        r'^torchtitan = \["torchtitan==([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf8"), re.MULTILINE
    )
    assert extra[1] == "0.2.2"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Runs ./benchmark.py where NVML shows two H200 and Python finds the fake torchtitan."""
    asked = ("--engine", "torchtitan", "--model", "llama", "--steps", "4", "--global-batch-size", "8")
    return benchmark_on(monkeypatch, *asked, **TWO_GPUS, OUTPUT_DIR=str(tmp_path / "out"))


def test_a_run_is_proven_by_the_log_and_done_again_only_where_it_must(machine, tmp_path):
    done = machine(run=run_script)
    assert done.returncode == 0, done.stderr
    record, folder = only_run(tmp_path / "out")
    how = record["engine"], record["outcome"], record["mismatches"], record["clock"]
    assert how == ("torchtitan", "completed", [], "framework")
    proof = record["evidence"]["workload"]
    assert (proof["tensor_parallel"], proof["data_parallel"], proof["micro_batch_sequences"]) == (1, 2, 1)
    assert (proof["global_batch_sequences"], proof["sequence_tokens"], proof["matmul_dtype"]) == (8, 2048, "bf16")
    assert (record["evidence"]["source"], record["machine"]["accelerator"]) == ("log", "NVIDIA H200")
    assert record["software"]["tprimat"]
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [(step["step"], step["loss"]) for step in steps] == [(1, 11), (2, 10), (3, 9), (4, 8)]
    assert (tmp_path / "out" / "benchmark_cuda_llama.json").is_file()
    again = machine("--resume")
    assert again.returncode == 0, again.stderr
    assert only_run(tmp_path / "out")[0] == record


def test_a_log_that_contradicts_the_plan_is_not_counted(machine, tmp_path):
    assert machine(FAKE_TITAN_BATCH="16", FAKE_TITAN_TENSOR="2", FAKE_TITAN_DTYPE="float32").returncode == 1
    record, _ = only_run(tmp_path / "out")
    assert record["outcome"] == "completed"
    assert {
        "global batch: 8 was asked for, 16 ran",
        "tensor parallel: 1 was asked for, 2 ran",
        "matmul dtype: bf16 was asked for, fp32 ran",
    } <= set(record["mismatches"])


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Says which versions of torchtitan and torch are installed, here and to the processes of ./benchmark.py."""

    def install(titan, torch):
        for name, version in (("torchtitan", titan), ("torch", torch)):
            folder = tmp_path / "site" / f"{name}-{version}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        paths = [str(tmp_path / "site"), str(FAKE_PACKAGES)]
        for path in reversed(paths):
            monkeypatch.syspath_prepend(path)
        return {"PYTHONPATH": os.pathsep.join(paths)}

    return install


def test_the_newer_torchtitan_is_told_the_rest_by_a_module_of_ours(machine, installed, tmp_path):
    words = ("--precision", "fp8", "--set", "platform_optimizations.nvidia.recompute=full")
    done = machine(*words, run=run_script, **installed("0.3.0", "2.14.1"))
    assert done.returncode == 0, done.stderr
    record, _ = only_run(tmp_path / "out")
    assert (record["outcome"], record["evidence"]["workload"]["global_batch_sequences"]) == ("completed", 8)
    log = (tmp_path / "out" / "training_llama.log").read_text()
    assert "model {'flavor': '8B', 'converters': [Config(model_compile_enabled=True)]}" in log
    assert "optimizer {'lr': 0.0001, 'betas': (0.9, 0.95), 'eps': 1e-08, 'weight_decay': 0.1} recomputes Config()" in log


def test_a_torchtitan_that_cannot_start_here_is_refused_with_the_versions(installed):
    installed("0.3.0", "2.13.0")
    with pytest.raises(LaunchError, match="torchtitan 0.3.0 needs torch 2.14 or newer; torch 2.13.0 is installed") as caught:
        choose("torchtitan", Here(platform="nvidia"))
    assert caught.value.fix.startswith("pip install torchtitan==0.2.2")


def test_a_plan_that_it_refuses_starts_nothing(machine, tmp_path):
    done = machine("--set", "data=text:stdlib")
    assert done.returncode == 2
    assert done.stderr.startswith("error: The engine torchtitan trains on mock data, not on text:stdlib.\n  at    --set data")
    assert not (tmp_path / "out").exists()
