"""What is said about a run before it starts and after it ran out of memory."""

import pytest
from changes import replace
from commands import run_command
from plans import request_of

from tprimat.config.load import Setting, read_config
from tprimat.core.errors import LaunchError
from tprimat.core.models import model_shape
from tprimat.records.schema import Machine
from tprimat.runner.prediction import gate, out_of_memory_hint, predicted, refuse_too_large
from tprimat.runner.session import plan_run

H200 = Machine(platform="cuda", accelerator="NVIDIA H200", gpus_per_node=8, nodes=1, memory_bytes=150_000_000_000)


def plan(gpus, micro_batch, strategy="minimal_communication", **changes):
    settings = [Setting(("training", "data", "micro_batch_size"), micro_batch, "test")]
    settings += [Setting(("platform_optimizations", "nvidia", *key.split("__")), value, "test") for key, value in changes.items()]
    request = request_of("llama", strategy, gpus_found=gpus)
    return plan_run(read_config(size="full", settings=settings, environment={}), request)


def test_a_model_that_fits_no_layout_needs_more_gpus():
    enough = "2 GPUs, the fewest that this model fits by prediction"
    alone = predicted(plan(1, 1), H200, ())
    assert out_of_memory_hint(alone, H200, None).endswith(enough)
    with pytest.raises(LaunchError) as refused:
        refuse_too_large(predicted(plan(1, 16), H200, ()), H200)
    assert refused.value.fix == f"{enough}; --force runs it anyway"
    narrowed = predicted(plan(1, 1, engine_options__gradients="bf16"), H200, ())
    refuse_too_large(narrowed, H200)


def test_fragments_are_named_first_and_then_the_same_layout_with_less():
    hint = out_of_memory_hint(predicted(plan(8, 16), H200, ()), H200, None)
    first, rest = hint.split("; then ")
    assert first == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert rest.startswith("what fits by prediction: --micro-batch-size ")


def test_what_is_too_tight_to_promise_runs_with_a_warning_that_names_what_fits():
    """Four H100 of 79.2 GiB: 77.0 GiB allocated, 79.4 reserved on an H200 that had room."""
    h100 = replace(H200, accelerator="NVIDIA H100 80GB HBM3", gpus_per_node=4, memory_bytes=round(79.18 * 2**30))
    tight = predicted(plan(4, 1), h100, ())
    assert 74 < tight.prediction.allocated_bytes / 2**30 < 79
    assert gate(tight, h100)[0] == "too tight to promise"
    warning = refuse_too_large(tight, h100)
    assert "too tight to promise" in warning
    assert "what fits by prediction" in warning
    assert refuse_too_large(predicted(plan(8, 1), H200, ()), H200) is None


def mixture(gpus, capacity):
    """OLMoE with sequences of 4,096 tokens, 16 at once, on GPUs that each hold the expert-parallel share of its weights."""
    whole = plan(gpus, 1)
    batch = {"micro_batch_sequences": 16, "global_batch_sequences": 64, "sequence_tokens": 4096}
    experts = {"expert_parallel": gpus, "expert_tensor_parallel": 1, "expert_capacity": capacity or "unlimited"}
    routed = replace(whole, shape=model_shape("olmoe-1b-7b"), **batch, **experts)
    return predicted(routed, replace(H200, gpus_per_node=gpus), ())


def test_a_capacity_that_may_drop_tokens_is_not_refused():
    with pytest.raises(LaunchError):
        refuse_too_large(mixture(4, None), H200)
    refuse_too_large(mixture(4, 1.25), H200)


def test_a_dry_run_says_what_its_prediction_assumes():
    words = ("--model", "qwen3_moe", "--platform", "nvidia", "--gpus", "8", "--set", "ep=8", "--dry-run", "--set")
    shown = run_command("benchmark.py", *words, "training.moe_expert_capacity_factor=1.25").stdout
    assert "predicted on the fullest rank if no token is dropped" in " ".join(shown.split())
