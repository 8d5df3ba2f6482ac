"""The models of the table train on the embedded engine in tiny sizes, on a CPU."""

import json
from pathlib import Path

import pytest
import yaml
from changes import replace
from commands import run_command
from planning import train_together

from tprimat.core import models as table
from tprimat.core.flops import parameters
from tprimat.core.models import model_shape, padded_vocabulary, tiny
from tprimat.plan.schema import RunPlan
from tprimat.records.store import from_json

ROOT = Path(__file__).parents[2]
TABLE = ("gpt-3-175b", "qwen-2.5-0.5b", "qwen3-8b", "olmoe-1b-7b", "deepseek-v3")
"""One of each kind of attention and of experts."""
ELSEWHERE = ("llama-3.1-8b", "qwen-2.5-7b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite")
"""Trained by test_layouts.py and test_experts.py."""
SHALLOW = 3
WORKLOAD = ("--steps", "2", "--global-batch-size", "2", "--sequence-length", "16", "--set", "data=mock", "--gpus", "1")


def trained_shape(model):
    """The tiny shape, most with few layers, and one with experts among them."""
    shape = tiny(model_shape(model))
    return replace(shape, layers=max(SHALLOW, shape.dense_first_layers + 1))


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
    return run_command("benchmark.py", "--output-dir", folder / "out", *WORKLOAD, *words)


def weights_of(shape):
    """Counted from the table's own facts, with the embedding padded as Megatron pads it."""
    return parameters(replace(shape, vocabulary=padded_vocabulary(shape))).total


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every model with its own width, heads, experts and switches, in one start of train_plans.py."""
    folder = tmp_path_factory.mktemp("models")
    done = benchmark(folder, "--config", configuration(folder, TABLE), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plans = [from_json(RunPlan, json.dumps(plan), where="--dry-run") for plan in json.loads(done.stdout)["plans"]]
    assert {plan.model: plan.workload.shape for plan in plans} == {model: tiny(model_shape(model)) for model in TABLE}
    plans = [replace(plan, shape=trained_shape(plan.model)) for plan in plans]
    return {plan.model: (plan, *result) for plan, result in zip(plans, train_together(plans), strict=True)}


@pytest.mark.parametrize("model", TABLE)
def test_a_model_of_the_table_trains_with_every_weight_that_its_facts_count(trained, model):
    plan, run, steps = trained[model]
    assert plan.workload.shape == trained_shape(model)
    assert (run.outcome, run.mismatches, run.ran.matmul_dtype) == ("completed", (), "fp32")
    assert run.evidence.parameters == weights_of(plan.workload.shape)
    assert len(steps) == 2
    assert all(step.finite and step.loss > 0 and step.grad_norm > 0 for step in steps)


def kinds(names):
    """What the layers of these models have, and what they do without."""
    switches = ("norm", "position", "gated", "linear_bias", "qkv_bias", "qk_norm", "tied_embeddings")
    of_experts = ("router_score", "router_normalized", "router_bias", "balance_by_sequence")
    counts = ("shared_experts", "router_groups", "dense_first_layers", "kv_lora_rank", "q_lora_rank", "rope_scaling")
    for shape in map(model_shape, names):
        yield from ((name, getattr(shape, name)) for name in (*switches, *(of_experts if shape.experts else ())))
        yield from ((name, bool(getattr(shape, name))) for name in counts)
        yield "grouped", shape.kv_heads < shape.heads


def test_the_table_has_no_kind_of_layer_that_is_not_trained():
    assert set(kinds(table.models())) == set(kinds((*TABLE, *ELSEWHERE)))
