"""The engine megatron-lm: Megatron-LM's own parser, of the installed package, takes every word, and its checks accept them."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import pytest
from changes import replace
from planning import make_plan

from tprimat.core.models import model_shape
from tprimat.engines.base import Here
from tprimat.engines.megatron_lm import ENGINE, SCRIPTS, arguments, words_of

pytestmark = pytest.mark.skipif(
    find_spec("megatron.bridge") is None,
    reason="megatron/training comes with Megatron-Core 0.17, which is in an environment of its own: make test-bridge",
)
CASES = {
    "llama-3.1-8b": ({"parallelism.balanced.llama.nvidia.pipeline_model_parallel_size": 2}, {"use_rope_scaling": True}),
    "qwen-2.5-7b": ({"platform_optimizations.nvidia.precision": "fp8"}, {"add_qkv_bias": True, "fp8": "hybrid"}),
    "qwen3-30b-a3b": (
        {"parallelism.balanced.llama.nvidia.expert_model_parallel_size": 4, "training.routing": "balanced"},
        {"num_experts": 128, "moe_router_force_load_balancing": True, "qk_layernorm": True},
    ),
    "llama-3-8b": ({"platform_optimizations.nvidia.precision": "mxfp8"}, {"fp8": "e4m3", "fp8_recipe": "mxfp8"}),
    "llama-2-7b": ({"platform_optimizations.nvidia.precision": "nvfp4"}, {"fp4": "e2m1", "fp4_recipe": "nvfp4"}),
    "mixtral-8x7b": ({"platform_optimizations.nvidia.precision": "fp8-blockwise"}, {"fp8": "hybrid", "fp8_recipe": "blockwise"}),
    "gpt-3-175b": ({"platform_optimizations.nvidia.recompute": "full"}, {"add_bias_linear": True, "recompute_method": "uniform"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_parser_takes_every_word(tmp_path, name):
    settings, resolved = CASES[name]
    settings = {"models.llama.architecture": name, "hardware.platforms.nvidia.gpus_per_node": 8, **settings}
    plan = make_plan(tmp_path, "llama", settings, strategy="balanced", layers=None, engine="megatron-lm", platform="nvidia")
    plan = replace(plan, shape=model_shape(name))
    assert ENGINE.refusal(plan, lambda *_: "") is None
    from tprimat.megatron import bootstrap

    bootstrap.redirect_to_cpu()
    from megatron.training.arguments import parse_args, validate_args

    ranks = {"WORLD_SIZE": str(plan.workload.world_size), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with (
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words_of(arguments(plan))]),
        mock.patch.dict(os.environ, ranks),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),  # of an H100, which is not here
        mock.patch("megatron.training.arguments.is_te_min_version", return_value=True),  # NVFP4 asks for one, which is not here
        mock.patch("torch.cuda.get_device_properties", return_value=SimpleNamespace(major=9)),
    ):
        given = parse_args()
        validate_args(given)
    parsed = vars(given)
    layout = plan.workload.layout
    wanted = {
        **resolved,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "num_layers": model_shape(name).layers,
        "global_batch_size": plan.workload.global_batch_sequences,
        "train_iters": plan.steps,
    }
    assert {key: parsed[key] for key in wanted} == wanted


def test_three_scripts_beside_the_package_will_do(tmp_path, monkeypatch):
    for name in SCRIPTS:
        (tmp_path / name).touch()
    monkeypatch.setenv("MEGATRON_PATH", str(tmp_path))
    assert ENGINE.available(Here(platform="nvidia")) == f"Megatron-LM is at {tmp_path}"
    plan = make_plan(tmp_path, "llama", {}, strategy="balanced", engine="megatron-lm", platform="nvidia")
    with mock.patch.dict(os.environ, ENGINE.command(plan).environment):
        import_module("megatron.core.datasets.utils").compile_helpers()  # as each start; it exits where make fails
