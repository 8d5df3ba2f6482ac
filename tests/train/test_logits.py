"""The engine's models against an independent implementation with the same weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from changes import replace
from planning import ROOT, make_plan

from tprimat.core.models import model_shape, tiny
from tprimat.plan.schema import write_plan

EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "deepseek-v2-lite", "deepseek-v3")
DROPPING = {"mixtral-8x7b, full": 0.75, "deepseek-v3, full": 1.0}
"""The same with experts that take this much of the mean, and drop the rest."""
MODELS = ("llama", "qwen", *EXPERTS, *DROPPING)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """All models, compared in one process."""
    folder = tmp_path_factory.mktemp("logits")
    files = [folder / f"{model}.json" for model in MODELS]
    for model, file in zip(MODELS, files, strict=True):
        name, _, full = model.partition(",")
        config_key = "mixtral" if name in EXPERTS else model
        layout = {"parallelism.minimal_communication.mixtral.cpu.expert_model_parallel_size": 1}
        plan = make_plan(
            folder, config_key, {**layout, "hardware.platforms.cpu.gpus_per_node": 1, "training.data.sequence_length": 32}
        )
        if name in EXPERTS:
            small = replace(tiny(model_shape(name)), hidden=64, heads=8, kv_heads=8, head_dim=16, layers=4, experts_per_token=4)
            if small.kv_lora_rank:
                small = replace(small, nope_head_dim=8, rope_head_dim=8, value_head_dim=12, kv_lora_rank=16)
            if full:
                small = replace(small, experts=16 if small.router_groups else small.experts)
            write_plan(file, replace(plan, shape=small, expert_capacity=DROPPING.get(model, "unlimited")))
            continue
        # Wider heads and a rotary base with wavelengths on both sides of the rescaling, so that every branch of it counts.
        write_plan(file, replace(plan, shape=replace(plan.workload.shape, head_dim=64, rope_base=500000.0)))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compare_logits.py"), *map(str, files)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(MODELS, map(json.loads, done.stdout.splitlines()[-len(MODELS) :]), strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_those_of_an_independent_implementation(compared, model):
    assert compared[model]["largest"] > 0.5
    assert compared[model]["difference"] < 1e-4


@pytest.mark.parametrize("model", DROPPING)
def test_full_experts_drop_the_same_choices_and_leave_the_same_gradients(compared, model):
    assert compared[model]["dropped"] > 50
    assert compared[model]["least_gradient"] > 0
    assert compared[model]["gradient_difference"] < 1e-4
