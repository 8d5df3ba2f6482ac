"""Every known version of Megatron-Core trains to the same losses.

0.16.1 in `make test`, 0.19.2 in `make test-core19`, and 0.15.3 in `make test-nemo`.
"""

from importlib import metadata

import pytest
from changes import replace
from planning import make_plan, train_together

from tprimat.core.models import model_shape, tiny
from tprimat.engines import embedded
from tprimat.train import compat

LAYOUT = "parallelism.minimal_communication.llama.cpu"
TENSOR, EXPERT = f"{LAYOUT}.tensor_model_parallel_size", f"{LAYOUT}.expert_model_parallel_size"
OPTIONS = "platform_optimizations.cpu.engine_options"
STRAIGHT = {f"{OPTIONS}.accumulate_weight_gradients": True}
"""As a GPU has by default."""
COMMON = {
    "training.duration.max_steps": 3,
    "training.data.global_batch_size": 4,
    "training.data.sequence_length": 32,
    "training.data.dataset": "mock",
    "training.optimizer.learning_rate": 1e-3,
    "experiment.seed": 7,
    "hardware.platforms.cpu.gpus_per_node": 2,
    f"{LAYOUT}.micro_batch_size": 1,
}
CASES = {
    "dp2": ("llama-3.1-8b", {}),
    "tp2": ("llama-3.1-8b", {**STRAIGHT, TENSOR: 2, f"{OPTIONS}.overlap_tensor_parallel": True}),
    "pp2": ("llama-3.1-8b", {f"{LAYOUT}.pipeline_model_parallel_size": 2}),
    "ep2": ("qwen3-30b-a3b", {**STRAIGHT, EXPERT: 2}),
    "latent tp2 ep2": ("deepseek-v2-lite", {TENSOR: 2, EXPERT: 2}),
}
"""The model whose tiny shape is trained, and settings."""
LOSSES = {
    "dp2": [6.255191206932068, 6.251180171966553, 6.244398713111877],
    "tp2": [6.255191445350647, 6.251180291175842, 6.244398832321167],
    "pp2": [6.255191206932068, 6.251180291175842, 6.244398832321167],
    "ep2": [6.285237193107605, 6.256767392158508, 6.2675909996032715],
    "latent tp2 ep2": [6.22479772567749, 6.263233065605164, 6.2588629722595215],
}
"""Recorded with Megatron-Core 0.16.1."""


def plan_of(folder, model, settings):
    plan = make_plan(folder, "llama", {**COMMON, "models.llama.architecture": model, **settings})
    return replace(plan, shape=replace(tiny(model_shape(model)), layers=3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("versions")
    plans = {name: plan_of(folder / name.replace(" ", "-"), *case) for name, case in CASES.items()}
    return dict(zip(plans, train_together(list(plans.values())), strict=True))


def test_this_version_is_a_known_one():
    assert metadata.version("megatron-core") in embedded.KNOWN_CORES == compat.KNOWN_VERSIONS["megatron-core"]


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_every_known_version(trained, name):
    run, steps = trained[name]
    assert run.mismatches == ()
    assert [step.loss for step in steps] == pytest.approx(LOSSES[name], abs=1e-5)


@pytest.mark.parametrize(("installed", "refused"), [("0.20.0rc1", True), ("1.0", True), ("0.19.5", False), ("0.15.0", False)])
def test_a_newer_version_is_refused_with_the_known_ones(monkeypatch, installed, refused):
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    error = embedded.ENGINE.untried()
    assert (error is not None) is refused
    if error:
        assert error.what == f"megatron-core {installed} is too new."
        assert "0.18.2 and 0.19.2" in error.why
        assert "--force starts it anyway" in error.fix
