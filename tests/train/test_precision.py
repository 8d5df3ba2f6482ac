"""Training in fp8 and with bf16 optimizer states."""

import pytest
import torch
from changes import replace
from planning import make_plan, split_settings, train_together

from tprimat.megatron.training import recorded, resolve

STRAIGHT = {"platform_optimizations.cpu.precision": "bf16", "accumulate_weight_gradients": True}
LONGER = {"training.duration.max_steps": 6, "training.data.sequence_length": 64, "training.optimizer.learning_rate": 5e-3}
SHORTER = {"training.duration.max_steps": 6, "training.data.global_batch_size": 2}
FP8_LAYERS = 1
"""torch multiplies fp8 on a CPU a hundred times slower than bf16."""
TP2, WAYS = {"tp": 2, "training.duration.max_steps": 2}, ("whole", "in pieces")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("precision")

    def plan(name, ranks=1, **split):
        return make_plan(folder / name, "qwen", split_settings("qwen", ranks, {**STRAIGHT, **LONGER, **split}))

    def thin(name, ranks=1, **split):
        settings = split_settings("llama", ranks, {**STRAIGHT, **SHORTER, **split})
        return make_plan(folder / name, "llama", settings, layers=FP8_LAYERS)

    plans = {
        "sharded": plan("sharded", 2, fully_shard=True, accumulate_weight_gradients="auto"),
        "bf16 gradients": plan("gradients", 2, gradients="bf16"),
        "bf16 states": plan("bf16", optimizer_states="bf16"),
        "masters": plan("masters"),
        "bf16": thin("plain"),
        "fp8": replace(thin("fp8"), matmul_dtype="fp8"),
        **{way: replace(thin(way, 2, **TP2, overlap_tensor_parallel=way == "in pieces"), matmul_dtype="fp8") for way in WAYS},
    }
    return dict(zip(plans, train_together(list(plans.values())), strict=True))


def test_the_record_says_what_the_states_were(trained):
    (bf16, _), (masters, _) = trained["bf16 states"], trained["masters"]
    assert bf16.evidence.workload.optimizer == "AdamW without master weights, states bfloat16"
    assert (bf16.evidence.workload.gradient_dtype, masters.evidence.workload.gradient_dtype) == ("bfloat16", "float32")
    assert bf16.engine_options["optimizer_states"] == "bf16"
    assert not bf16.engine_options["distributed_optimizer"]
    assert bf16.mismatches == ()


def test_the_first_step_is_that_of_fp32_states_and_the_loss_falls(trained):
    (_, bf16), (_, masters) = trained["bf16 states"], trained["masters"]
    assert bf16[0].loss == masters[0].loss
    assert bf16[0].grad_norm == pytest.approx(masters[0].grad_norm, rel=0.01)
    assert bf16[-1].loss < bf16[0].loss - 0.2
    assert bf16[-1].loss != masters[-1].loss


def test_gradients_in_bf16_update_fp32_masters_of_two_replicas(trained):
    (run, halved), (_, masters) = trained["bf16 gradients"], trained["masters"]
    assert (run.mismatches, run.evidence.workload.gradient_dtype, run.evidence.workload.data_parallel) == ((), "bfloat16", 2)
    assert run.engine_options["gradients"] == "bf16"
    assert run.evidence.workload.optimizer == "DistributedOptimizer over CompiledAdamW"
    assert [step.loss for step in halved] == pytest.approx([step.loss for step in masters], rel=0.01)
    assert [step.grad_norm for step in halved] == pytest.approx([step.grad_norm for step in masters], rel=0.05)
    assert halved[-1].grad_norm != masters[-1].grad_norm


def test_weights_split_over_replicas_in_fp32_compute_in_bf16(trained):
    (run, sharded), (_, masters) = trained["sharded"], trained["masters"]
    evidence = run.evidence
    dtypes = run.ran.matmul_dtype, evidence.workload.parameter_dtype, evidence.workload.gradient_dtype
    assert dtypes == ("bf16", "bfloat16", "float32")
    assert (run.mismatches, evidence.workload.weights_split_over) == ((), 2)
    assert sharded[0].loss == pytest.approx(masters[0].loss, abs=1e-6)
    assert [step.loss for step in sharded] == pytest.approx([step.loss for step in masters], rel=0.001)
    assert [step.grad_norm for step in sharded] == pytest.approx([step.grad_norm for step in masters], rel=0.05)


def test_tensor_ranks_that_exchange_8_bits_scale_as_whole_matrices_do(trained):
    (whole, steps), (pieces, same) = (trained[way] for way in WAYS)
    assert (whole.engine_options["overlap_tensor_parallel"], pieces.engine_options["overlap_tensor_parallel"]) == (False, True)
    assert [(step.loss, step.grad_norm) for step in steps] == [(step.loss, step.grad_norm) for step in same]
    assert pieces.ran.matmul_dtype == "fp8"


def test_training_in_fp8_follows_bf16_but_is_not_it_and_says_what_ran(trained):
    (wide, plain), (run, small) = trained["bf16"], trained["fp8"]
    scaling = wide.evidence.workload.fp8_scaling, run.evidence.workload.fp8_scaling, run.evidence.workload.attention_dtype
    assert scaling == (None, "current", None)
    assert (run.ran.matmul_dtype, run.evidence.workload.parameter_dtype, run.mismatches) == ("fp8", "bfloat16", ())
    assert small[-1].loss < small[0].loss - 0.3
    assert [step.loss for step in small] == pytest.approx([step.loss for step in plain], rel=0.02)
    assert [step.loss for step in small] != pytest.approx([step.loss for step in plain], rel=1e-6)


@pytest.mark.parametrize(
    ("precision", "layers", "named"),
    [("fp8", "transformer_engine", True), ("fp8", "local", False), ("bf16", "transformer_engine", False)],
)
def test_the_record_names_the_scaling_of_transformer_engines_layers_in_fp8(tmp_path, precision, layers, named):
    plan = make_plan(tmp_path, "llama", {})
    plan = replace(plan, matmul_dtype=precision, engine_options=replace(plan.engine_options, fp8_scaling="current"))
    facts = recorded(plan, replace(resolve(plan, torch.device("cpu")), layers=layers))
    assert facts.get("fp8_scaling") == ("current" if named else None)
    assert facts["layers"] == layers
