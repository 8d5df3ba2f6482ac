"""Recipes of Megatron-Bridge, shrunk, train on a CPU through ./benchmark.py and torchrun. Their speed says nothing."""

import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from changes import replace
from commands import ROOT, only_run, run_script
from planning import make_plan

from tprimat.core.flops import parameters
from tprimat.core.models import model_shape, padded_vocabulary
from tprimat.plan.schema import write_plan
from tprimat.records.store import RunDirectory

pytestmark = pytest.mark.skipif(
    find_spec("megatron.bridge") is None,
    reason="Megatron-Bridge is not installed in this environment; it has one of its own: make test-bridge",
)
STEPS = 4
TUNED = "perf_recipes.llama.h100.llama3:llama3_8b_pretrain_8gpu_h100_bf16_config"
OTHERS = ((1, 1, 1), (1, 2, 1), (1, 1, 2))
"""Degrees of pipeline, tensor and data parallelism that .ci/run leaves out."""


@pytest.fixture(autouse=True)
def redirected():
    from tprimat.megatron import bootstrap

    bootstrap.redirect_to_cpu()


def benchmark(folder, model, ranks=2, **settings):
    """The run and the steps."""
    layout = f"parallelism.minimal_communication.{model}.cpu"
    words = f"--model {model} --engine bridge --platform cpu --gpus {ranks} --steps {STEPS} --output-dir {folder}".split()
    for key, value in {"training.data.global_batch_size": 4, "training.data.sequence_length": 32, **settings}.items():
        words += ["--set", f"{key.replace('LAYOUT', layout).replace('__', '.')}={value}"]
    done = run_script("benchmark.py", *words, environment={"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    log = folder / f"training_{model}.log"
    assert done.returncode == 0, done.stderr[-2000:] + (log.read_text(encoding="utf8")[-6000:] if log.exists() else "")
    directory = RunDirectory(only_run(folder)[1])
    return directory.read_run(), directory.read_steps()


@pytest.mark.parametrize("degrees", [(2, 1, 1), *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_a_tuned_recipe_trains_as_planned(tmp_path, degrees):
    settings = {"LAYOUT__pipeline_model_parallel_size": degrees[0], "LAYOUT__tensor_model_parallel_size": degrees[1]}
    settings |= {"LAYOUT__sequence_parallel": "false", "platform_optimizations__cpu__bridge__recipe": TUNED}
    run, steps = benchmark(tmp_path, "llama", math.prod(degrees), **settings)
    assert (run.engine, run.outcome, run.mismatches) == ("bridge", "completed", ())
    seen = run.evidence.workload
    assert (seen.pipeline_parallel, seen.tensor_parallel, seen.data_parallel) == degrees
    assert (seen.global_batch_sequences, seen.sequence_tokens) == (4, 32)
    assert seen.matmul_dtype == "fp32"
    shape = run.workload.shape
    assert run.evidence.parameters == parameters(replace(shape, vocabulary=padded_vocabulary(shape))).total
    assert (run.engine_options["recipe"], run.engine_options["grad_reduce_in_fp32"]) == (TUNED, False)  # as NVIDIA tuned it
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert min(step.loss for step in steps) < steps[0].loss
    assert all(step.grad_norm and step.learning_rate and step.tokens == 4 * 32 and step.peak_allocated_bytes for step in steps)
    assert [step.learning_rate for step in steps] == sorted(step.learning_rate for step in steps)


def test_experts_over_two_ranks_are_balanced_by_our_own_key(tmp_path):
    run, _ = benchmark(tmp_path, "mixtral", LAYOUT__expert_model_parallel_size=2, training__routing="balanced")
    assert (run.outcome, run.mismatches) == ("completed", ())
    assert (run.evidence.workload.expert_parallel, run.evidence.workload.routing) == (2, "balanced")


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen-2.5-7b", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_a_recipe_gets_the_plans_model_and_settings(tmp_path, name):
    from tprimat.bridge.recipe import build_config, model_fields

    settings = {
        "models.llama.architecture": name,
        "training.duration.max_steps": 7,
        "training.optimizer.learning_rate": 5e-4,
        "experiment.seed": 3,
        "parallelism.minimal_communication.llama.cpu.micro_batch_size": 2,
    }
    plan = make_plan(tmp_path, "llama", settings, engine="bridge", layers=None)
    plan = replace(plan, shape=model_shape(name))
    cfg = build_config(plan)
    assert {key: getattr(cfg.model, key) for key in model_fields(model_shape(name))} == model_fields(model_shape(name))
    assert (cfg.train.train_iters, cfg.train.micro_batch_size, cfg.rng.seed, cfg.optimizer.lr) == (7, 2, 3, 5e-4)
    assert cfg.checkpoint.save is None


def test_a_rank_starts_again_with_the_variables_of_its_recipe(tmp_path):
    write_plan(tmp_path / "plan.json", make_plan(tmp_path, "llama", {}, engine="bridge"))
    program = f"""
import os, pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
from tprimat.bridge import VARIABLES, restart_with
from tprimat.train.worker import read_plan, trainer_of
os.environ["STARTS"] = str(int(os.environ.get("STARTS", "0")) + 1)
trainer_of(read_plan(pathlib.Path({str(tmp_path / "plan.json")!r})))
os.environ.update(usual := {{name: value for name, value in VARIABLES.items() if name not in os.environ}})
restart_with({{"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": os.environ["WANTED"]}}, usual)
print(os.environ["STARTS"], os.environ["NCCL_NVLS_ENABLE"], os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
"""
    file = tmp_path / "rank.py"
    file.write_text(program, encoding="utf8")
    for wanted, starts in (("32", "2"), ("1", "1")):
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "1", "WANTED": wanted}
        done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [starts, "1", wanted]


def test_a_tuned_recipe_for_experts_gives_up_their_overlap_on_one_rank(tmp_path):
    from tprimat.bridge.recipe import build_config

    tuned = "perf_recipes.qwen.h100.qwen3_moe:qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config"
    settings = {"models.llama.architecture": "qwen3-30b-a3b", "platform_optimizations.cpu.bridge.recipe": tuned}
    plan = make_plan(tmp_path, "llama", settings, engine="bridge", layers=None)
    cfg = build_config(plan)
    assert cfg.comm_overlap.overlap_moe_expert_parallel_comm is False
    assert cfg.model.moe_router_force_load_balancing is False  # natural routing was asked for


@pytest.mark.parametrize(("precision", "recipe"), [("fp8-blockwise", "blockwise"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4")])
def test_scales_of_blocks_are_bridges_own(tmp_path, precision, recipe):
    from tprimat.bridge.recipe import build_config

    settings = {"platform_optimizations.nvidia.precision": precision}
    plan = make_plan(tmp_path, "llama", settings, engine="bridge", platform="nvidia", layers=None)
    mixed = build_config(plan).mixed_precision
    assert mixed.fp4_recipe == recipe if mixed.fp4 else mixed.fp8_recipe == recipe
