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


@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_logits_equal_those_of_an_independent_implementation(tmp_path, model):
    plan = make_plan(tmp_path, model, {"hardware.platforms.cpu.gpus_per_node": 1, "training.data.sequence_length": 32})
    # Wider heads and a rotary base with wavelengths on both sides of the rescaling, so that every branch of it counts.
    shape = replace(plan.shape, head_dim=64, rope_base=500000.0)
    write_plan(tmp_path / "plan.json", replace(plan, shape=shape))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "compare_logits.py"), str(tmp_path / "plan.json")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["largest"] > 0.5
    assert result["difference"] < 1e-4
