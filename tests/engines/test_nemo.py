"""The engine nemo before anything is started: what is missing is named, and the two lists of requirements agree."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from changes import replace
from plans import request_of

from tprimat.config.load import Setting, read_config
from tprimat.core.errors import LaunchError
from tprimat.engines import nemo
from tprimat.engines.base import Here, Settings, choose
from tprimat.plan.build import build_plan
from tprimat.predict.memory import predict_memory

ROOT = Path(__file__).parent.parent.parent


def test_the_message_names_what_nemo_lacks_here_and_how_to_install_it(monkeypatch):
    monkeypatch.setattr(nemo, "REQUIRED_MODULES", ("json", "no_such_module_a", "no_such_parent.part"))
    with pytest.raises(LaunchError) as caught:
        choose("nemo", Here(platform="nvidia"))
    assert caught.value.what.startswith("The engine nemo needs no_such_module_a, no_such_parent.part, not installed for")
    assert "make nemo" in caught.value.fix


def test_auto_takes_nemo_on_nvidia_when_it_is_whole_and_says_what_it_lacks_otherwise(monkeypatch):
    monkeypatch.setattr(nemo, "REQUIRED_MODULES", ("json",))
    assert choose("auto", Here(platform="nvidia")).engine is nemo.ENGINE
    assert choose("auto", Here(platform="cpu")).engine.name == "megatron"
    monkeypatch.setattr(nemo, "REQUIRED_MODULES", ("json", "no_such_module"))
    choice = choose("auto", Here(platform="nvidia"))
    assert choice.engine.name == "megatron"
    assert choice.reason == "NeMo needs no_such_module, not installed here"


def test_looking_for_nemo_imports_none_of_it():
    code = "import sys; from tprimat.engines import nemo; nemo.missing_modules(); print([m for m in HEAVY if m in sys.modules])"
    code = code.replace("HEAVY", "('torch', 'nemo', 'lightning')")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
    "qwen3-8b": "NeMo's recipe qwen25_7b cannot express qk_norm: true of qwen3-8b.",
    "mixtral-8x7b": "NeMo's recipe qwen25_7b cannot express experts: 8 of mixtral-8x7b.",
    "gpt-3-175b": "NeMo's recipe qwen25_7b cannot express norm: layernorm, position: learned, gated: false, linear_bias: true "
    "of gpt-3-175b.",
    "deepseek-v3": "NeMo's recipe qwen25_7b cannot express experts: 256, shared_experts: 1, dense_first_layers: 3, "
    "router_score: sigmoid, router_normalized: true, kv_lora_rank: 512 (latent attention) of deepseek-v3.",
    "llama-3.1-8b": "NeMo's recipe qwen25_7b cannot rescale rotary frequencies, and llama-3.1-8b asks for it by rope_scaling.",
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_shape_that_no_recipe_can_express_is_refused_before_the_start(architecture):
    plan = plan_of(models__llama__architecture=architecture, models__llama__nemo_recipe="qwen25_7b")
    error = nemo.ENGINE.refusal(plan, place)
    assert error.what == REFUSED[architecture]
    assert error.fix.endswith("--engine megatron")


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"models__llama__nemo_recipe": None}, "The model llama names no NeMo recipe."),
        (
            {"models__llama__architecture": "qwen-2.5-7b"},
            "NeMo's recipe llama31_8b rescales rotary frequencies, and qwen-2.5-7b has no rope_scaling.",
        ),
        ({"experiment__seed": 0}, "NeMo takes positive seeds only."),
        ({"platform_optimizations__nvidia__engine_options__fully_shard": True}, "fully_shard is on."),
    ],
)
def test_other_plans_that_nemo_cannot_carry_out_are_refused(settings, what):
    assert nemo.ENGINE.refusal(plan_of(**settings), place).what == what


@pytest.mark.parametrize(
    ("options", "refused", "why"),
    [
        ({"tp_comm_overlap": True}, "tp_comm_overlap is true.", "without tensor and sequence parallelism"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl is local.", "no CUDA graphs with recomputation, and recompute is full"),
        ({"grad_reduce_in_fp32": False}, "grad_reduce_in_fp32 is false.", "Gradients have the dtype of the weights"),
        ({"first_last_layers_bf16": True}, "first_last_layers_bf16 is true.", "under fp8 with current scaling only"),
        ({"overlap_param_gather": True}, "overlap_param_gather is true.", "It needs overlap_grad_reduce"),
        ({"overlap_grad_reduce": False}, "overlap_grad_reduce is false.", "The recipe may overlap the gathering"),
    ],
)
def test_an_option_that_contradicts_the_plan_is_refused_with_its_place(options, refused, why):
    settings = {f"platform_optimizations__nvidia__nemo__{name}": value for name, value in options.items()}
    unsplit = {"parallelism__balanced__llama__nvidia__tensor_model_parallel_size": 1}
    other = {"platform_optimizations__nvidia__precision": "fp32", "platform_optimizations__nvidia__recompute": "full"}
    error = nemo.ENGINE.refusal(plan_of(**settings, **unsplit, **other), place)
    assert (error.what, error.where) == (refused, f"platform_optimizations.nvidia.nemo.{next(iter(options))}")
    assert why in error.why
    assert error.fix


@pytest.mark.parametrize(
    ("model", "settings", "why"),
    [
        ("mixtral", {}, "The host waits for the number of tokens of each expert"),
        (
            "llama",
            {"platform_optimizations__nvidia__environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
            "Megatron-Core refuses CUDA graphs with expandable_segments",
        ),
    ],
)
def test_cuda_graphs_are_refused_where_megatron_cannot_capture(model, settings, why):
    graphs = {"platform_optimizations__nvidia__nemo__cuda_graph_impl": "local"}
    error = nemo.ENGINE.refusal(plan_of(model, **graphs, **settings), place)
    assert error.what == "cuda_graph_impl is local."
    assert why in error.why


def test_options_that_need_transformer_engine_say_how_to_get_it(monkeypatch):
    monkeypatch.setattr(nemo, "can_import", lambda _: False)
    for name, value in (("cross_entropy_fusion_impl", "te"), ("tp_comm_overlap", True), ("cuda_graph_impl", "local")):
        error = nemo.ENGINE.lacking(plan_of(**{f"platform_optimizations__nvidia__nemo__{name}": value}), place)
        assert error.what.startswith(f"{name} is {str(value).lower()}, and Transformer Engine is not installed here")
        assert "pip install transformer-engine" in error.fix


def test_memory_is_predicted_with_the_loss_and_the_gradients_that_are_asked_for():
    def predicted(**options):
        plan = plan_of(
            **{f"platform_optimizations__nvidia__nemo__{name}": value for name, value in options.items()},
            training__data__micro_batch_size=4,
        )
        settings = Settings(shape=plan.workload.shape, options=nemo.ENGINE.options(plan), transformer_engine=True)
        code = nemo.ENGINE.implementation(settings)
        return predict_memory(replace(plan.workload, implementation=code)).parts

    own, tuned = predicted(), predicted(cross_entropy_fusion_impl="te", grad_reduce_in_fp32=False)
    assert tuned["gradients"] * 2 == own["gradients"]
    assert tuned["loss"] < own["loss"] / 2


def test_the_two_models_of_the_configuration_are_accepted():
    for settings in ({}, {"models__llama__architecture": "qwen-2.5-7b", "models__llama__nemo_recipe": "qwen25_7b"}):
        plan = plan_of(**settings)
        assert nemo.ENGINE.refusal(plan, place) is None
        assert nemo.ENGINE.command(plan).ranks_per_node == 8


@pytest.mark.parametrize(
    ("text", "works"), [(None, False), ("raise OSError('libcudnn.so.9: cannot open shared object file')", False), ("", True)]
)
def test_transformer_engine_counts_when_it_can_be_imported(tmp_path, monkeypatch, text, works):
    if text is not None:
        package = tmp_path / "pretend_engine"
        package.mkdir()
        (package / "__init__.py").write_text(text)
        (package / "pytorch.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nemo, "TRANSFORMER_ENGINE", "pretend_engine")
    nemo.can_import.cache_clear()
    fp8 = plan_of(platform_optimizations__nvidia__precision="fp8")
    assert (nemo.ENGINE.lacking(fp8, place) is None) is works
    assert nemo.ENGINE.lacking(plan_of(), place) is None
    nemo.can_import.cache_clear()
