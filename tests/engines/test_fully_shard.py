"""What the embedded engine cannot combine with weights that are split over the replicas, before anything starts."""

import pytest

from tprimat.config.load import Setting, parse_setting, read_config
from tprimat.engines.embedded import ENGINE
from tprimat.plan.build import PlanRequest, build_plan

OPTIONS = "platform_optimizations.nvidia.engine_options"
LAYOUT = "parallelism.minimal_communication.llama.nvidia"


def place(*keys):
    return ".".join(keys)


def refusal(*changes, model="llama"):
    settings = [parse_setting(change) for change in (f"{OPTIONS}.fully_shard=true", *changes)]
    request = PlanRequest(
        model=model,
        strategy="minimal_communication",
        platform="nvidia",
        size="full",
        engine="megatron",
        engine_reason="test",
        gpus_found=8,
        run_id="run",
        run_directory="/nowhere",
        output_directory="/nowhere",
    )
    overlay = [*settings, Setting(("hardware", "platforms", "nvidia", "gpus_per_node"), 8, "test")]
    return ENGINE.refusal(build_plan(read_config(settings=overlay, environment={}), request), place)


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
        (f"{OPTIONS}.overlap_grad_reduce=false", "overlap_grad_reduce is off", "overlap_grad_reduce: true"),
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
        "training.data.micro_batch_size=auto",
        "platform_optimizations.nvidia.precision=fp32",
    ],
)
def test_what_goes_with_it_is_not_refused(change):
    assert refusal(change) is None
