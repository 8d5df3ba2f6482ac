"""The engine nemo before anything is started: what is missing is named, and the two lists of requirements agree."""

import re
from pathlib import Path

import pytest
from changes import replace
from plans import request_of

from tprimat.config.load import Setting, read_config
from tprimat.core.errors import LaunchError
from tprimat.engines import nemo
from tprimat.engines.base import Here, choose
from tprimat.plan.build import build_plan
from tprimat.predict.memory import predict_memory

ROOT = Path(__file__).parent.parent.parent


def test_what_nemo_lacks_here_is_named_and_auto_goes_on_without_it(monkeypatch):
    monkeypatch.setattr(nemo.NemoEngine, "needs", ("json",))
    assert choose("auto", Here(platform="nvidia"))[0] is nemo.ENGINE
    monkeypatch.setattr(nemo.NemoEngine, "needs", ("json", "no_such_module_a", "no_such_parent.part"))
    with pytest.raises(LaunchError) as caught:
        choose("nemo", Here(platform="nvidia"))
    assert caught.value.what.startswith("The engine nemo needs no_such_module_a, no_such_parent.part, not installed here")
    assert "make nemo" in caught.value.fix
    engine, reason = choose("auto", Here(platform="nvidia"))
    assert engine.name == "megatron"
    assert reason.startswith("bridge is preferred, but it needs megatron.bridge"), "which auto would have started first"


def test_the_extra_and_the_requirements_file_ask_for_the_same():
    listed = (ROOT / "requirements-nemo.txt").read_text(encoding="utf8").split("# What ./benchmark.py itself needs there.")[0]
    wanted = [line for line in listed.splitlines() if line and not line.startswith("#")]
    extra = re.search(r"^nemo = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf8"), re.MULTILINE)
    assert re.findall(r'"([^"]+)"', extra[1]) == wanted


def place(*keys):
    return ".".join(keys)


def plan_of(name="llama", **settings):
    overlay = [Setting(tuple(key.split("__")), value, "test") for key, value in settings.items()]
    return build_plan(read_config(settings=overlay, environment={}), request_of(name, "balanced", engine="nemo"))


REFUSED = {
    "qwen3-8b": "qk_norm of qwen3-8b.",
    "mixtral-8x7b": "experts of mixtral-8x7b.",
    "gpt-3-175b": "norm: layernorm, position: learned, gated: false, linear_bias: true of gpt-3-175b.",
    "deepseek-v3": "shared_experts: 1, dense_first_layers: 3, kv_lora_rank: 512 (latent attention), "
    "router_score: sigmoid, router_normalized: true, experts of deepseek-v3.",
    "llama-3.1-8b": "rope_scaling of llama-3.1-8b.",
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_shape_that_no_recipe_can_express_is_refused_before_the_start(architecture):
    plan = plan_of(models__llama__architecture=architecture, models__llama__nemo_recipe="qwen25_7b")
    error = nemo.ENGINE.refusal(plan, place)
    assert error.what == f"NeMo's recipe qwen25_7b cannot express {REFUSED[architecture]}"
    assert error.fix.endswith("--engine megatron")


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({}, None),
        ({"models__llama__architecture": "qwen-2.5-7b", "models__llama__nemo_recipe": "qwen25_7b"}, None),
        ({"models__llama__nemo_recipe": None}, "The model llama names no NeMo recipe."),
        ({"models__llama__architecture": "qwen-2.5-7b"}, "NeMo's recipe llama31_8b has rope_scaling, which qwen-2.5-7b lacks."),
        (
            {"models__llama__nemo_recipe": "gemma2_2b"},
            "NeMo's recipe gemma2_2b may have other kinds of layers than llama-3.1-8b.",
        ),
        ({"experiment__seed": 5}, "NeMo always trains with seed 1234."),
        ({"training__data__dataset": "text:/a"}, "The engine nemo trains on mock data, not on text:/a."),
        ({"training__optimizer__schedule": "linear"}, "NeMo's linear schedule has no warm-up."),
        ({"platform_optimizations__nvidia__engine_options__fully_shard": True}, "fully_shard is on."),
    ],
)
def test_plans_that_nemo_cannot_carry_out_are_refused(settings, what):
    refused = nemo.ENGINE.refusal(plan_of(**settings), place)
    assert (refused and refused.what) == what
    assert refused is None or refused.fix


def test_memory_is_predicted_with_the_loss_that_is_asked_for_and_by_its_version():
    def predicted(transformer_engine=True, **options):
        plan = plan_of(
            **{f"platform_optimizations__nvidia__nemo__{name}": value for name, value in options.items()},
            training__data__micro_batch_size=4,
        )
        code = nemo.ENGINE.implementation(plan.workload.shape, nemo.ENGINE.options(plan), transformer_engine)
        return predict_memory(replace(plan.workload, implementation=code)).parts

    older, newer = (predicted(version, cross_entropy_fusion_impl="te")["loss"] for version in ("2.18.0", "2.20.2"))
    assert older < newer == predicted(cross_entropy_fusion_impl="te")["loss"] < predicted()["loss"]
