"""The dense models of the table train on the embedded engine through config.yaml alone, in their tiny sizes, on a CPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from planning import train_together

from tprimat.facts import models as table
from tprimat.facts.flops import parameters
from tprimat.facts.models import model_shape, padded_vocabulary, tiny
from tprimat.plan.schema import RunPlan
from tprimat.records.discover import load_results
from tprimat.records.files import from_json

ROOT = Path(__file__).parents[2]
DENSE = (
    "gpt-3-175b",
    "gpt-462b",
    "llama-2-7b",
    "llama-2-13b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.1-405b",
    "qwen-2.5-32b",
    "qwen-2.5-72b",
    "qwen3-8b",
    "gpt-30m",
)
"""Beside Llama 3.1 8B and Qwen 2.5 7B, which test_strategies.py trains, and one size of the suite for the others."""
AS_DEEP_AS_THEY_ARE = ("gpt-3-175b", "qwen3-8b")
SHALLOW = 3
WORKLOAD = ("--steps", "2", "--global-batch-size", "2", "--sequence-length", "16", "--data", "mock", "--gpus", "1")


def configuration(folder, models):
    """config.yaml with other models, as a user writes it."""
    document = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf8"))
    layout = {"cpu": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}}
    document["models"] = {name: {"name": model_shape(name).name, "architecture": name} for name in models}
    document["parallelism"] = {"minimal_communication": dict.fromkeys(models, layout)}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf8")
    return file


def benchmark(folder, *words):
    command = [sys.executable, ROOT / "benchmark.py", "--output-dir", folder / "out", *WORKLOAD, *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=500, check=False)


def weights_of(shape):
    """Counted from the table's own facts, with the embedding padded as Megatron pads it."""
    return parameters(replace(shape, vocabulary=padded_vocabulary(shape))).total


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """Every model with its own width, heads and switches and few of its layers, in one start of torchrun."""
    folder = tmp_path_factory.mktemp("table")
    done = benchmark(folder, "--config", configuration(folder, DENSE), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plans = [from_json(RunPlan, json.dumps(plan), where="--dry-run") for plan in json.loads(done.stdout)["plans"]]
    plans = [replace(plan, shape=replace(plan.shape, layers=SHALLOW)) for plan in plans]
    return {plan.model: (plan, *result) for plan, result in zip(plans, train_together(plans), strict=True)}


@pytest.mark.parametrize("model", DENSE)
def test_a_model_of_the_table_trains_with_every_weight_that_its_facts_count(shallow, model):
    plan, run, steps = shallow[model]
    assert plan.shape == replace(tiny(model_shape(model)), layers=SHALLOW)
    assert (run.outcome, run.mismatches, run.matmul_dtype) == ("completed", (), "fp32")
    assert run.evidence.parameters == weights_of(plan.shape)
    assert len(steps) == 2
    assert all(step.finite and step.loss > 0 and step.grad_norm > 0 for step in steps)


def test_every_switch_of_a_dense_shape_is_on_in_one_of_them_and_off_in_another():
    shapes = [model_shape(name) for name in DENSE]
    for switch in ("qkv_bias", "qk_norm", "linear_bias", "tied_embeddings", "gated"):
        assert {getattr(shape, switch) for shape in shapes} == {True, False}, switch
    assert {(shape.norm, shape.position) for shape in shapes} == {("layernorm", "learned"), ("rmsnorm", "rope")}


def test_the_table_has_no_dense_model_that_is_not_trained():
    dense = {name for name, shape in table.models().items() if shape.experts is None and shape.kv_lora_rank is None}
    suite = {name for name in dense if "MI350X" in (model_shape(name).source or "")}
    assert dense - suite == {*DENSE, "llama-3.1-8b", "qwen-2.5-7b"} - {"gpt-30m"}


def test_one_call_of_the_benchmark_trains_two_of_them_at_full_depth(tmp_path):
    done = benchmark(tmp_path, "--config", configuration(tmp_path, AS_DEEP_AS_THEY_ARE), "--quiet")
    assert done.returncode == 0, done.stderr + done.stdout
    results, problems = load_results([tmp_path / "out" / "runs"])
    assert problems == []
    assert {result.run.model: result.run.evidence.parameters for result in results} == {
        name: weights_of(tiny(model_shape(name))) for name in AS_DEEP_AS_THEY_ARE
    }
    assert all(result.run.counts and len(result.steps) == 2 for result in results)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v3"])
def test_a_model_with_experts_is_refused_before_anything_starts(tmp_path, model):
    done = benchmark(tmp_path, "--config", configuration(tmp_path, [model]))
    assert done.returncode == 2
    assert "trains dense models only" in done.stderr
    assert "config.yaml:" in done.stderr
    assert not (tmp_path / "out").exists()
