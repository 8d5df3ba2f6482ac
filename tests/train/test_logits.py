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
MODELS = ("llama", "qwen", *EXPERTS)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """All models, compared in one process."""
    folder = tmp_path_factory.mktemp("logits")
    files = [folder / f"{model}.json" for model in MODELS]
    for model, file in zip(MODELS, files, strict=True):
        config_key = "mixtral" if model in EXPERTS else model
        layout = {"parallelism.minimal_communication.mixtral.cpu.expert_model_parallel_size": 1}
        plan = make_plan(
            folder, config_key, {**layout, "hardware.platforms.cpu.gpus_per_node": 1, "training.data.sequence_length": 32}
        )
        if model in EXPERTS:
            small = replace(tiny(model_shape(model)), hidden=64, heads=8, kv_heads=8, head_dim=16, layers=4, experts_per_token=4)
            if small.kv_lora_rank:
                small = replace(small, nope_head_dim=8, rope_head_dim=8, value_head_dim=12, kv_lora_rank=16)
            write_plan(file, replace(plan, shape=small))
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
