"""The real recipes, shrunk, train on a CPU: each layout by its plan, and end to end through ./benchmark.py and torchrun.

Their speed says nothing.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from changes import replace
from needs_nemo import ROOT, needs_nemo

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

import reference_run
from planning import SHALLOW, make_plan, train_together

from tprimat.records.store import RunDirectory

pytestmark = needs_nemo

STEPS = reference_run.STEPS
LAYOUTS = {"1 rank": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}
SETTINGS = (*(f"{key}={value}" for key, value in reference_run.SETTINGS.items()), "benchmarking.hang_minimum_seconds=60")


def run_benchmark(folder, model, tensor, pipeline, *flags, engine="nemo", path=None):
    """(run, steps) of one model under one layout, and the launcher's exit code."""
    layout = f"parallelism.minimal_communication.{model}.cpu"
    settings = [*SETTINGS, f"{layout}.tensor_model_parallel_size={tensor}", f"{layout}.pipeline_model_parallel_size={pipeline}"]
    command = [sys.executable, "benchmark.py", "--model", model, "--engine", engine, "--platform", "cpu", "--json"]
    command += ["--gpus", str(tensor * pipeline), "--steps", str(STEPS), "--global-batch-size", "4", "--sequence-length", "32"]
    command += ["--output-dir", str(folder), *(word for setting in settings for word in ("--set", setting)), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": str(path)} if path else {})}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    log = folder / f"training_{model}.log"
    assert done.returncode == 0, done.stderr[-2000:] + (log.read_text(encoding="utf8")[-6000:] if log.exists() else "")
    run_id = json.loads(done.stdout)["runs"][0]["run"]["run_id"]
    directory = RunDirectory(folder / "runs" / run_id)
    return directory.read_run(), directory.read_steps()


def mixture_plan(folder, model, experts):
    """A small mixture of experts on two ranks, which share the experts or do not."""
    settings = {
        **dict(setting.split("=") for setting in SETTINGS),
        "hardware.platforms.cpu.gpus_per_node": 2,
        f"parallelism.minimal_communication.{model}.cpu.expert_model_parallel_size": experts,
        "training.duration.max_steps": STEPS,
        "training.data.global_batch_size": 4,
        "training.data.sequence_length": 32,
        "training.data.dataset": "mock",
    }
    plan = make_plan(folder, model, {key: yaml.safe_load(str(value)) for key, value in settings.items()}, engine="nemo")
    return replace(plan, shape=replace(plan.workload.shape, experts=8, experts_per_token=2))


def plan_of(folder, model, tensor=1, pipeline=1, layers=SHALLOW, **settings):
    """The plan that `run_benchmark` makes of the same, with few layers."""
    layout = f"parallelism.minimal_communication.{model}.cpu"
    given = {
        **dict(setting.split("=") for setting in SETTINGS),
        "hardware.platforms.cpu.gpus_per_node": tensor * pipeline,
        f"{layout}.tensor_model_parallel_size": tensor,
        f"{layout}.pipeline_model_parallel_size": pipeline,
        "training.duration.max_steps": STEPS,
        "training.data.global_batch_size": 4,
        "training.data.sequence_length": 32,
        "training.data.dataset": "mock",
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    numbers = {key: yaml.safe_load(str(value)) for key, value in given.items()}
    return make_plan(folder, model, numbers, layers=layers, engine="nemo")


CASES = [(model, name) for model in ("llama", "qwen") for name in LAYOUTS]
MIXTURES = [("qwen3_moe", 2), ("mixtral", 2), ("mixtral", 1)]
"""Model and ranks that share its experts."""
SEEDS = (5, 6)
OPTIONS = {
    "overlapped": {"precision": "fp32", "nemo.overlap_grad_reduce": True, "nemo.overlap_param_gather": True},
    "in turn": {"precision": "fp32", "nemo.overlap_grad_reduce": False, "nemo.overlap_param_gather": False},
    "bf16 gradients": {
        "precision": "bf16",
        "nemo.grad_reduce_in_fp32": False,
        "recompute": "selective",
        "recompute_modules": ["layernorm", "mlp"],
    },
}
"""Qwen over two replicas; its recipe says nothing of them."""
VIRTUAL = "parallelism__minimal_communication__llama__cpu"
PROFILED = {
    "hardware__platforms__cpu__gpus_per_node": 2,
    "training__duration__max_steps": 6,
    "training__data__dataset": "text:stdlib",
    "profiling__enabled": True,
    "profiling__schedule__wait": 0,
    "profiling__schedule__warmup": 1,
    "profiling__schedule__active": 1,
}
"""Two replicas, one profiled step."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every layout of both models, and what the tests of seeds look at, where NeMo is imported once."""
    folder = tmp_path_factory.mktemp("nemo")
    plans = {}
    for model, name in CASES:
        precision = "bf16" if model == "qwen" else "fp32"
        where = folder / f"{model}-{name}".replace(" ", "-")
        plans[model, name] = plan_of(where, model, *LAYOUTS[name], platform_optimizations__cpu__precision=precision)
    for seed in SEEDS:
        text = {"training__data__dataset": "text:stdlib", "experiment__seed": seed}
        plans["mock", seed] = plan_of(folder / f"mock-{seed}", "llama", layers=None, experiment__seed=seed)
        plans["text", seed] = plan_of(folder / f"text-{seed}", "qwen", 1, 2, **text)
    for model, experts in MIXTURES:
        plans[model, experts] = mixture_plan(folder / f"{model}-ep{experts}", model, experts)
    for name, options in OPTIONS.items():
        given = {f"platform_optimizations.cpu.{key}": value for key, value in options.items()}
        where = folder / name.replace(" ", "-")
        plans["options", name] = plan_of(where, "qwen", hardware__platforms__cpu__gpus_per_node=2, **given)
    virtual = {f"{VIRTUAL}__virtual_pipeline_model_parallel_size": 2}
    plans["llama", "virtual stages"] = plan_of(folder / "virtual", "llama", 1, 2, **virtual)
    plans["text", "profiled"] = plan_of(folder / "profiled", "llama", **PROFILED)
    return {"folder": folder, **dict(zip(plans, train_together(list(plans.values())), strict=True))}


@pytest.mark.parametrize(("model", "name"), CASES)
def test_a_shrunk_recipe_trains_under_each_kind_of_split(trained, model, name):
    tensor, pipeline = LAYOUTS[name]
    precision = "bf16" if model == "qwen" else "fp32"
    run, steps = trained[model, name]
    evidence = run.evidence
    assert (run.outcome, run.mismatches, run.engine) == ("completed", (), "nemo")
    assert (evidence.workload.tensor_parallel, evidence.workload.pipeline_parallel, evidence.workload.data_parallel) == (
        tensor,
        pipeline,
        1,
    )
    assert evidence.workload.sequence_parallel is (tensor > 1)
    assert (evidence.workload.micro_batch_sequences, evidence.workload.global_batch_sequences, evidence.tokens_per_step) == (
        1,
        4,
        128,
    )
    assert (evidence.workload.matmul_dtype, evidence.workload.gradient_dtype) == (precision, "float32")
    assert (evidence.workload.recompute, evidence.workload.data) == ("none", "NeMo MockDataModule (seed 1234)")
    assert evidence.first_sequence == trained["llama", "1 rank"][0].evidence.first_sequence
    assert {evidence.grades[fact] for fact in ("recompute", "sequence_parallel", "matmul_dtype", "data")} == {"observed"}
    assert evidence.parameters == {"llama": 689280, "qwen": 575024}[model]
    assert evidence.transformer_engine is False
    assert [note for note in evidence.notes if "Transformer Engine" in note]
    assert [note for note in evidence.notes if "on the CPU" in note]
    assert [step.step for step in steps] == [1, 2, 3]
    # Random tokens cannot be learned: the loss stays near that of a guess among 512.
    assert all(step.finite and step.loss == pytest.approx(math.log(512), abs=0.3) for step in steps)
    assert all(step.tokens == 128 and step.grad_norm > 0 and step.step_seconds > 0 for step in steps)
    assert [step.learning_rate for step in steps] == pytest.approx([1.5e-3, 3e-3, 1.65e-3])


def test_virtual_stages_get_gradients_of_the_size_of_plain_ones(trained):
    """Without overlap_p2p_comm Megatron-Core 0.15.3 hands wrong activations on between chunks, and norms explode."""
    (run, steps), (_, plain) = trained["llama", "virtual stages"], trained["llama", "pp2"]
    assert (run.mismatches, run.evidence.workload.virtual_pipeline) == ((), 2)
    assert steps[0].grad_norm == pytest.approx(plain[0].grad_norm, rel=0.3)


def test_the_embedded_engine_gives_with_these_versions_the_losses_that_it_gives_with_its_own(tmp_path):
    """Megatron-Core 0.15.3 and Lightning 2.4 here; newer ones in tests/train/test_core_versions.py, with the same losses."""
    from importlib.metadata import version

    assert version("megatron-core") == "0.15.3"
    run, steps = run_benchmark(
        tmp_path, reference_run.MODEL, reference_run.TENSOR_RANKS, 1, "--set", "data=mock", engine="megatron"
    )
    assert run.mismatches == ()
    assert [step.loss for step in steps] == pytest.approx(reference_run.LOSSES, abs=1e-5)
    assert [step.grad_norm for step in steps] == pytest.approx(reference_run.GRAD_NORMS, rel=1e-4)


def test_the_seed_decides_on_weights_and_data_and_a_broken_transformer_engine_is_none(trained, tmp_path):
    """The same seed, the same losses, also through ./benchmark.py beside a package that cannot be imported; another, others."""
    package = tmp_path / "broken" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise OSError('libcudnn.so.9: cannot open shared object file')")
    flags = ("--set", "data=mock", "--set", "experiment.seed=5")
    again, second = run_benchmark(tmp_path, "llama", 1, 1, *flags, path=package.parent)
    (one, first), (_, third) = (trained["mock", seed] for seed in SEEDS)
    assert [step.loss for step in first] == [step.loss for step in second]
    assert [step.grad_norm for step in first] == [step.grad_norm for step in second]
    assert abs(first[0].loss - third[0].loss) > 1e-4
    assert abs(first[0].grad_norm - third[0].grad_norm) > 1e-4
    assert one.evidence.parameters == again.evidence.parameters == 4595840
    assert (one.seed, one.evidence.workload.data, again.evidence.transformer_engine) == (5, "NeMo MockDataModule (seed 5)", False)


def test_the_options_of_the_tuned_recipes_run_as_asked_and_overlap_changes_no_loss(trained):
    (overlapped, first), (in_turn, second), (halved, _) = (trained["options", name] for name in OPTIONS)
    assert [step.loss for step in first] == pytest.approx([step.loss for step in second], abs=1e-6)
    for run, overlap in ((overlapped, True), (in_turn, False)):
        assert (run.mismatches, run.evidence.workload.data_parallel, run.evidence.workload.gradient_dtype) == ((), 2, "float32")
        assert run.engine_options == {
            "cross_entropy_fusion_impl": "native",
            "grad_reduce_in_fp32": True,
            "overlap_grad_reduce": overlap,
            "overlap_param_gather": overlap,
            "gradient_accumulation_fusion": False,
            "tp_comm_overlap": False,
            "cuda_graph_impl": "none",
            "first_last_layers_bf16": False,
        }
    assert (halved.mismatches, halved.evidence.workload.gradient_dtype) == ((), "bfloat16")
    assert halved.engine_options["grad_reduce_in_fp32"] is False
    assert (halved.evidence.workload.recompute, halved.evidence.workload.recompute_modules) == ("selective", ("layernorm", "mlp"))


@pytest.mark.parametrize(("model", "experts"), MIXTURES)
def test_a_shrunk_recipe_with_experts_trains_with_and_without_expert_parallelism(trained, model, experts):
    run, steps = trained[model, experts]
    assert (run.outcome, run.mismatches, run.engine) == ("completed", (), "nemo")
    assert (run.evidence.workload.expert_parallel, run.evidence.workload.data_parallel, run.evidence.workload.routing) == (
        experts,
        2,
        "natural",
    )
    assert [step.step for step in steps] == [1, 2, 3]
    assert all(step.finite and step.loss == pytest.approx(math.log(512), abs=0.4) for step in steps)
    # The busiest of 8 experts has more than the mean, and at most all 2 choices of each token; no choice is lost.
    assert all(1 < step.expert_load <= 8 / 2 for step in steps)
    assert all(1 <= step.rank_load <= min(experts, step.expert_load) for step in steps)
    assert all((step.rank_load > 1) == (experts > 1) for step in steps)
    assert all(step.dropped == 0 for step in steps)


def test_weights_alone_follow_the_seed_on_each_pipeline_stage(trained):
    losses = [trained["text", seed][1][0].loss for seed in SEEDS]
    assert losses[0] != losses[1]


def test_our_text_is_learned_over_two_replicas_and_profiled_on_the_way(trained):
    run, steps = trained["text", "profiled"]
    folder = trained["folder"] / "profiled"
    assert (run.mismatches, run.evidence.workload.data_parallel) == ((), 2)
    assert run.evidence.workload.data == "text:stdlib (bytes)"
    assert steps[-1].loss < steps[0].loss - 0.3
    assert run.profiled_steps == (1, 2, 3)
    assert len(steps) == 6
    (named,) = folder.glob("profile_cpu_llama_*.json")
    trace = json.loads(named.read_text())
    assert named.samefile(folder / "profiler" / run.run_id / "rank_0.1.pt.trace.json")
    assert (trace["tprimat"]["run_id"], trace["tprimat"]["step_of_profiler_step_0"]) == (run.run_id, 1)
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert {name for name in names if name.startswith("ProfilerStep#")} == {"ProfilerStep#1"}
    assert "aten::mm" in names
