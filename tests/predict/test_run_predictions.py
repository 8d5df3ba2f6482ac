"""What is said about a run before it starts and after it ran out of memory."""

import pytest
from changes import replace
from commands import run_command
from plans import request_of

from tprimat.config.load import Setting, read_config
from tprimat.core.errors import LaunchError
from tprimat.core.models import model_shape
from tprimat.records.schema import Machine
from tprimat.runner.prediction import doubtful_memory, out_of_memory_hint, predicted, refuse_too_large
from tprimat.runner.session import plan_run

H200 = Machine(platform="cuda", accelerator="NVIDIA H200", gpus_per_node=8, nodes=1, memory_bytes=150_000_000_000)


H100 = replace(H200, accelerator="NVIDIA H100 80GB HBM3", gpus_per_node=2, memory_bytes=85_000_000_000)


def plan(gpus, micro_batch, strategy="minimal_communication", **changes):
    settings = [Setting(("training", "data", "micro_batch_size"), micro_batch, "test")]
    settings += [Setting(("platform_optimizations", "nvidia", *key.split("__")), value, "test") for key, value in changes.items()]
    request = request_of("llama", strategy, gpus_found=gpus)
    return plan_run(read_config(size="full", settings=settings, environment={}), request)


def test_a_model_that_fits_no_layout_needs_narrower_gradients_or_more_gpus():
    enough = "2 GPUs, the fewest that this model fits by prediction"
    narrow = "--set platform_optimizations.nvidia.engine_options.gradients=bf16"
    alone = predicted(plan(1, 1), H200, ())
    rounds = "which rounds sums of gradients"
    assert out_of_memory_hint(alone, H200, "otherwise") == f"{narrow} (136.8 GiB), {rounds}; or {enough}"
    with pytest.raises(LaunchError) as refused:
        refuse_too_large(predicted(plan(1, 16), H200, ()), H200)
    fewer = f"{narrow} --micro-batch-size 1 (136.8 GiB), {rounds}"
    assert refused.value.fix == f"{fewer}; {enough}; --force runs it anyway"
    narrowed = predicted(plan(1, 1, engine_options__gradients="bf16"), H200, ())
    refuse_too_large(narrowed, H200)
    assert out_of_memory_hint(narrowed, H200, "otherwise").startswith("export PYTORCH_CUDA_ALLOC_CONF")


def test_states_in_bf16_are_the_last_resort_of_a_single_gpu():
    states = "--set platform_optimizations.nvidia.engine_options.optimizer_states=bf16"
    enough = "2 GPUs, the fewest that this model fits by prediction"
    hint = out_of_memory_hint(predicted(plan(1, 1), H100, ()), H100, "otherwise")
    assert hint == f"{states} (73.9 GiB), for measuring only: small updates are lost; or {enough}"
    large = replace(plan(1, 1), shape=model_shape("llama-3.1-70b"))
    assert "bf16" not in out_of_memory_hint(predicted(large, H100, ()), H100, "otherwise")


def test_where_another_engine_fits_it_is_named_before_more_gpus():
    """On 4 H100, sequences of 131,072 tokens fit the embedded engine's loss, which NeMo's without Transformer Engine is not."""
    long = {"micro_batch_sequences": 1, "global_batch_sequences": 4, "sequence_tokens": 131_072}
    machine = replace(H100, gpus_per_node=4)
    by_nemo = predicted(replace(plan(4, 1), **long, engine="nemo"), machine, ())
    with pytest.raises(LaunchError) as refused:
        refuse_too_large(by_nemo, machine)
    other, more, forced = refused.value.fix.split("; ")
    assert other.startswith("--engine megatron, which fits: ")
    assert "recompute full" in other
    assert (more, forced) == ("8 GPUs, the fewest that this model fits by prediction", "--force runs it anyway")
    assert out_of_memory_hint(by_nemo, machine, "otherwise") == f"{other}; or {more}"


def test_fragments_are_named_first_and_then_the_same_layout_with_less():
    hint = out_of_memory_hint(predicted(plan(8, 16), H200, ()), H200, "otherwise")
    first, rest = hint.split("; then ")
    assert first == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert rest.startswith("what fits by prediction: --micro-batch-size ")


def test_weights_split_over_the_replicas_are_named_where_they_let_the_layout_fit():
    whole, again = predicted(plan(2, 4, recompute="full"), H100, ()), predicted(plan(2, 4), H100, ())
    with pytest.raises(LaunchError, match="fits: --set platform_optimizations.nvidia.engine_options.fully_shard=true"):
        refuse_too_large(again, H100)
    with pytest.raises(LaunchError):
        refuse_too_large(whole, H100)
    sharded = predicted(plan(2, 4, recompute="full", engine_options__fully_shard=True), H100, ())
    refuse_too_large(sharded, H100)
    assert "fully_shard" not in out_of_memory_hint(sharded, H100, "otherwise")


def mixture(gpus, capacity):
    """OLMoE with sequences of 4,096 tokens, 16 at once, on GPUs that each hold the expert-parallel share of its weights."""
    whole = plan(gpus, 1)
    batch = {"micro_batch_sequences": 16, "global_batch_sequences": 64, "sequence_tokens": 4096}
    experts = {"expert_parallel": gpus, "expert_tensor_parallel": 1, "expert_capacity": capacity or "unlimited"}
    routed = replace(whole, shape=model_shape("olmoe-1b-7b"), **batch, **experts)
    return predicted(routed, replace(H200, gpus_per_node=gpus), ())


def test_a_capacity_that_may_drop_tokens_is_warned_of_and_not_refused():
    with pytest.raises(LaunchError):
        refuse_too_large(mixture(4, None), H200)
    assert doubtful_memory(mixture(4, None), H200) is None
    refuse_too_large(mixture(4, 1.25), H200)
    assert "if no token is dropped" in doubtful_memory(mixture(4, 1.25), H200)


def test_a_dry_run_says_what_its_prediction_assumes():
    words = ("--model", "qwen3_moe", "--platform", "nvidia", "--gpus", "8", "--set", "ep=8", "--dry-run", "--set")
    shown = run_command("benchmark.py", *words, "training.moe_expert_capacity_factor=1.25").stdout
    assert "predicted on the fullest rank if no token is dropped" in " ".join(shown.split())


def test_weights_that_fit_no_gpu_are_refused_under_any_capacity():
    small = replace(H200, memory_bytes=20 * 2**30)
    with pytest.raises(LaunchError):
        refuse_too_large(mixture(4, 1.25), small)
