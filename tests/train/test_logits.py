"""The engine's models against an independent implementation with the same weights."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from planning import ROOT, make_plan

from tprimat.plan.schema import write_plan

MODELS = ("llama", "qwen")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Both models, compared in one process."""
    folder = tmp_path_factory.mktemp("logits")
    files = [folder / f"{model}.json" for model in MODELS]
    for model, file in zip(MODELS, files, strict=True):
        plan = make_plan(folder, model, {"hardware.platforms.cpu.gpus_per_node": 1, "training.data.sequence_length": 32})
        # Wider heads and a rotary base with wavelengths on both sides of the rescaling, so that every branch of it counts.
        write_plan(file, replace(plan, shape=replace(plan.shape, head_dim=64, rope_base=500000.0)))
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
