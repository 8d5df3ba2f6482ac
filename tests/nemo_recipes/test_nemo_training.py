"""The real recipes, shrunk, train on a CPU, each layout by its plan; ready_nemo.py has what a CPU needs. Speed says nothing."""

import math
import sys
from pathlib import Path

import pytest
import yaml
from changes import replace
from needs_nemo import needs_nemo

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

from planning import make_plan, train_together

pytestmark = needs_nemo

STEPS = 3
LAYOUTS = {"1 rank": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}
CASES = [(model, name) for model in ("llama", "qwen") for name in LAYOUTS]
MIXTURES = [("qwen3_moe", 2), ("mixtral", 1)]
"""Model and ranks that share its experts."""
VIRTUAL = "parallelism__minimal_communication__llama__cpu__virtual_pipeline_model_parallel_size"
RECOMPUTED = {
    "platform_optimizations__cpu__recompute": "selective",
    "platform_optimizations__cpu__recompute_modules": ["layernorm", "mlp"],
    "profiling__enabled": True,
    "profiling__schedule": {"wait": 0, "warmup": 1, "active": 1},
}


def plan_of(folder, model, tensor=1, pipeline=1, data=1, **settings):
    layout = f"parallelism.minimal_communication.{model}.cpu"
    given = {
        "training.data.micro_batch_size": 1,
        "training.optimizer.warmup_steps": 1,
        "training.optimizer.learning_rate": 3e-3,
        "training.optimizer.min_learning_rate": 3e-4,
        "hardware.platforms.cpu.gpus_per_node": tensor * pipeline * data,
        f"{layout}.tensor_model_parallel_size": tensor,
        f"{layout}.pipeline_model_parallel_size": pipeline,
        f"{layout}.expert_model_parallel_size": 1,
        "training.duration.max_steps": STEPS,
        "training.data.global_batch_size": 4,
        "training.data.sequence_length": 32,
        "training.data.dataset": "mock",
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    return make_plan(folder, model, {key: yaml.safe_load(str(value)) for key, value in given.items()}, engine="nemo")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every layout of both models, where NeMo is imported once."""
    folder = tmp_path_factory.mktemp("nemo")
    plans = {}
    for model, name in CASES:
        precision = "bf16" if model == "qwen" else "fp32"
        where = folder / f"{model}-{name}".replace(" ", "-")
        plans[model, name] = plan_of(where, model, *LAYOUTS[name], platform_optimizations__cpu__precision=precision)
    for model, experts in MIXTURES:
        expert = {f"parallelism__minimal_communication__{model}__cpu__expert_model_parallel_size": experts}
        plan = plan_of(folder / f"{model}-ep{experts}", model, data=2, **expert)
        plans[model, experts] = replace(plan, shape=replace(plan.workload.shape, experts=8, experts_per_token=2))
    plans["recomputed"] = plan_of(folder / "recomputed", "qwen", data=2, **RECOMPUTED)
    plans["virtual stages"] = plan_of(folder / "virtual", "llama", 1, 2, **{VIRTUAL: 2})
    return {"folder": folder, **dict(zip(plans, train_together(list(plans.values())), strict=True))}


@pytest.mark.parametrize(("model", "name"), CASES)
def test_a_shrunk_recipe_trains_under_each_kind_of_split(trained, model, name):
    (tensor, pipeline), (run, steps) = LAYOUTS[name], trained[model, name]
    evidence, seen = run.evidence, run.evidence.workload
    assert (run.outcome, run.mismatches, run.engine) == ("completed", (), "nemo")
    assert (seen.tensor_parallel, seen.pipeline_parallel, seen.data_parallel) == (tensor, pipeline, 1)
    assert seen.sequence_parallel is (tensor > 1)
    assert (seen.micro_batch_sequences, seen.global_batch_sequences, evidence.tokens_per_step) == (1, 4, 128)
    assert (seen.matmul_dtype, seen.gradient_dtype) == ("bf16" if model == "qwen" else "fp32", "float32")
    assert (seen.recompute, seen.data) == ("none", "NeMo MockDataModule")
    assert evidence.first_sequence == trained["llama", "1 rank"][0].evidence.first_sequence
    assert [evidence.grades[fact] for fact in ("matmul_dtype", "data", "recompute")] == ["observed", "observed", "resolved"]
    assert evidence.parameters == {"llama": 689280, "qwen": 575024}[model]
    assert evidence.transformer_engine is False
    assert run.engine_options["cross_entropy_fusion_impl"] == "native"
    assert [step.step for step in steps] == [1, 2, 3]
    # Random tokens cannot be learned: the loss stays near that of a guess among 512.
    assert all(step.finite and step.loss == pytest.approx(math.log(512), abs=0.3) for step in steps)
    assert all(step.tokens == 128 and step.grad_norm > 0 and step.step_seconds > 0 for step in steps)
    assert [step.learning_rate for step in steps] == pytest.approx([1.5e-3, 3e-3, 1.65e-3])


def test_virtual_stages_get_gradients_of_the_size_of_plain_ones(trained):
    """Without overlap_p2p_comm Megatron-Core 0.15.3 hands wrong activations on between chunks, and norms explode."""
    (run, steps), (_, plain) = trained["virtual stages"], trained["llama", "pp2"]
    assert (run.mismatches, run.evidence.workload.virtual_pipeline) == ((), 2)
    assert steps[0].grad_norm == pytest.approx(plain[0].grad_norm, rel=0.3)


def test_recomputed_modules_are_seen_over_two_replicas_and_profiled_steps_recorded(trained):
    run, steps = trained["recomputed"]
    seen = run.evidence.workload
    assert (run.mismatches, seen.data_parallel, seen.recompute) == ((), 2, "selective")
    assert (seen.recompute_modules, run.profiled_steps, len(steps)) == (("layernorm", "mlp"), (1, 2, 3), 3)
    (named,) = (trained["folder"] / "recomputed").glob("profile_cpu_qwen_*.json")
    assert "aten::mm" in named.read_text()


@pytest.mark.parametrize(("model", "experts"), MIXTURES)
def test_a_shrunk_recipe_with_experts_trains_with_and_without_expert_parallelism(trained, model, experts):
    run, steps = trained[model, experts]
    seen = run.evidence.workload
    assert (run.outcome, run.mismatches, run.engine) == ("completed", (), "nemo")
    assert (seen.expert_parallel, seen.data_parallel, seen.routing) == (experts, 2, "natural")
    assert all(step.finite and step.loss == pytest.approx(math.log(512), abs=0.4) for step in steps)
    # The busiest of 8 experts has more than the mean, and at most all 2 choices of each token; no choice is lost.
    assert all(1 < step.expert_load <= 8 / 2 for step in steps)
    assert all((step.rank_load > 1) == (experts > 1) for step in steps)
    assert all(step.dropped == 0 for step in steps)
