"""--engine auto where NeMo really is installed: it looks at what the plan asks for, and says why."""

import json
import os
import subprocess
import sys

import pytest
from needs_nemo import ROOT, needs_nemo

pytestmark = needs_nemo


@pytest.fixture
def llama_of(tmp_path):
    """Engine and reason of a plan for Llama beside a package that looks like Transformer Engine."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()

    def plan(*flags):
        command = [sys.executable, "benchmark.py", "--dry-run", "--json", "--platform", "nvidia", "--model", "llama", *flags]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        (made,) = json.loads(done.stdout)["plans"]
        return made["engine"], made["engine_reason"]

    return plan


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("models.llama.nemo_recipe=null", "The model llama names no NeMo recipe."),
        ("models.llama.architecture=qwen3-8b", "NeMo's recipe llama31_8b cannot express qk_norm of qwen3-8b."),
    ],
)
def test_what_nemo_cannot_do_goes_to_the_embedded_engine(llama_of, setting, reason):
    assert llama_of("--set", setting) == ("megatron", f"NeMo is installed, but does not fit: {reason}")


def test_what_fits_is_trained_by_nemo(llama_of):
    assert llama_of("--precision", "fp8") == ("nemo", "NeMo is installed")
