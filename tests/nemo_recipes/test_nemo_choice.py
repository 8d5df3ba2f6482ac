"""--engine auto where NeMo really is installed: it looks at what the plan asks for, and says why."""

import json
import os
import subprocess
import sys

import pytest
from needs_nemo import ROOT, needs_nemo

pytestmark = needs_nemo

FITS_NOT = "NeMo is installed, but does not fit: "


def plans_of(*flags, path=None):
    command = [sys.executable, "benchmark.py", "--dry-run", "--json", "--platform", "nvidia", *flags]
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else None
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return {plan["model"]: (plan["engine"], plan["engine_reason"]) for plan in json.loads(done.stdout)["plans"]}


def sets(*settings):
    return [word for setting in settings for word in ("--set", setting)]


def test_each_model_gets_the_engine_that_fits_it():
    made = plans_of(*sets("models.qwen.nemo_recipe=null"))
    assert made["llama"] == ("nemo", "NeMo is installed")
    assert made["qwen"] == ("megatron", FITS_NOT + "The model qwen names no NeMo recipe.")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--precision", "fp8"), "NeMo cannot train in fp8 here: Transformer Engine is not installed, or does not import."),
        (
            sets("parallelism.balanced.llama.nvidia.context_parallel_size=2"),
            "NeMo cannot split a sequence over 2 ranks here: Transformer Engine is not installed, or does not import.",
        ),
        (
            sets("models.llama.architecture=qwen3-8b"),
            "NeMo's recipe llama31_8b cannot express qk_norm: true of qwen3-8b.",
        ),
    ],
)
def test_what_nemo_cannot_do_goes_to_the_embedded_engine(flags, reason):
    made = plans_of("--model", "llama", "--parallel", "balanced", *flags)
    assert made["llama"] == ("megatron", FITS_NOT + reason)


@pytest.mark.parametrize(("text", "engine"), [("raise OSError('libcudnn.so.9')", "megatron"), ("", "nemo")])
def test_a_transformer_engine_that_cannot_be_imported_is_none(tmp_path, text, engine):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(text)
    (package / "pytorch.py").write_text("")
    assert plans_of("--model", "llama", "--precision", "fp8", path=tmp_path)["llama"][0] == engine
