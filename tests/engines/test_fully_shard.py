"""Weights that are split over the replicas: what the embedded engine cannot combine with them, and who says that they are."""

from pathlib import Path

import pytest
from plans import request_of

from tprimat.analyze.metrics import run_metrics
from tprimat.config.load import Setting, parse_setting, read_config
from tprimat.engines.embedded import ENGINE
from tprimat.plan.build import build_plan
from tprimat.records.discover import load_results
from tprimat.report.summary import summary
from tprimat.runner.run import announcement

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks" / "records" / "h200"

OPTIONS = "platform_optimizations.nvidia.engine_options"
LAYOUT = "parallelism.minimal_communication.llama.nvidia"


def place(*keys):
    return ".".join(keys)


def refusal(*changes, model="llama"):
    return ENGINE.refusal(plan_of(*changes, model=model), place)


def plan_of(*changes, model="llama"):
    settings = [parse_setting(change) for change in (f"{OPTIONS}.fully_shard=true", *changes)]
    overlay = [*settings, Setting(("hardware", "platforms", "nvidia", "gpus_per_node"), 8, "test")]
    return build_plan(read_config(settings=overlay, environment={}), request_of(model, "minimal_communication"))


@pytest.mark.parametrize(
    ("change", "what", "fix"),
    [
        (f"{LAYOUT}.tensor_model_parallel_size=2", "the layout has tensor parallelism", "a --parallel with TP1"),
        (f"{LAYOUT}.pipeline_model_parallel_size=2", "the layout has pipeline parallelism", "a --parallel with PP1"),
        ("platform_optimizations.nvidia.precision=fp8", "the precision is fp8", "--precision bf16"),
        (f"{OPTIONS}.layers=transformer_engine", "layers is transformer_engine", "layers: local"),
        (f"{OPTIONS}.gradients=bf16", "gradients is bf16", "gradients: fp32"),
        (f"{OPTIONS}.accumulate_weight_gradients=true", "accumulate_weight_gradients is on", "accumulate_weight_gradients: auto"),
        (f"{OPTIONS}.distributed_optimizer=false", "distributed_optimizer is off", "distributed_optimizer: true"),
    ],
)
def test_what_does_not_go_with_it_is_refused_with_the_way_out(change, what, fix):
    error = refusal(change)
    assert error.what == f"fully_shard is on, and {what}."
    assert error.where == f"{OPTIONS}.fully_shard"
    assert error.why
    assert error.fix.startswith(fix)
    assert error.fix.endswith(", or fully_shard: false")


def test_a_mixture_of_experts_is_refused():
    assert refusal(model="mixtral").what == "fully_shard is on, and mixtral-8x7b has experts."


@pytest.mark.parametrize(
    "change",
    [
        "platform_optimizations.nvidia.recompute=full",
        f"{LAYOUT}.context_parallel_size=2",
        "platform_optimizations.nvidia.precision=fp32",
    ],
)
def test_what_goes_with_it_is_not_refused(change):
    assert refusal(change) is None


def test_plan_and_summary_say_that_weights_are_split():
    assert ", fully sharded, GradAccum" in announcement(plan_of())
    assert "sharded" not in announcement(plan_of(f"{OPTIONS}.fully_shard=false"))
    ((split, whole), _) = load_results([RECORDS / "fully-sharded" / "mbs4_full", RECORDS / "two-gpus" / "engine" / "dp_mbs4"])
    texts = [summary([(one.run, run_metrics(one.run, one.steps), Path("log"))]) for one in (split, whole)]
    assert ["weights split over 2" in text for text in texts] == [True, False]
