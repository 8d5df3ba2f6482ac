"""The same model, the same batches: the same losses and gradient norms in every layout."""

import argparse
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from planning import make_plan, train_together

STEPS = 3
SEQUENCES = 4
COMMON = {
    "training.duration.max_steps": STEPS,
    "training.data.global_batch_size": SEQUENCES,
    "training.data.sequence_length": 32,
    "training.optimizer.learning_rate": 1e-3,
    "training.data.dataset": f"text:{Path(argparse.__file__)}",
}
"""One file of text: each of many ranks reads all of it."""
DIVISION = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}
OPTIONS = "platform_optimizations.cpu"

VARIANTS = {
    1: {
        "1 rank": {},
        "1 rank, tied": {},
        "1 rank, wide vocabulary": {},
        "1 rank, plain optimizer": {"distributed_optimizer": False},
        "1 rank, compiled Adam": {"compiled_adam": True},
        "1 rank, full recompute": {"recompute": "full"},
        "1 rank, full recompute of 1 layer": {"recompute": "full", "recompute_layers": 1},
        "1 rank, selective recompute of layernorm and mlp": {"recompute": "selective", "recompute_modules": ["mlp", "layernorm"]},
        "1 rank, joint cut and rotation": {"compiled_regions": True},
        "1 rank, gradients straight into the buffer": {"accumulate_weight_gradients": True, "streamed_cross_entropy": True},
        "1 rank, tied, gradients straight into the buffer": {
            "accumulate_weight_gradients": True,
            "streamed_cross_entropy": True,
        },
        "1 rank, plain optimizer and full recompute, gradients straight into the buffer": {
            "distributed_optimizer": False,
            "recompute": "full",
            "accumulate_weight_gradients": True,
            "streamed_cross_entropy": True,
        },
    },
    2: {
        "tp2": {"tp": 2},
        "tp2 without sequence parallelism": {"tp": 2, "sequence_parallel": False},
        "pp2": {"pp": 2},
        "pp2, wide vocabulary": {"pp": 2},
        "pp2 even, wide vocabulary": {"pp": 2, "balanced_stages": False},
        "pp2, tied": {"pp": 2},
        "pp2, tied, streamed cross-entropy": {"pp": 2, "streamed_cross_entropy": True},
        "tp2, tied": {"tp": 2},
        "pp2 vpp2": {"pp": 2, "vpp": 2},
        "pp2 even, full recompute of 1 layer": {
            "pp": 2,
            "balanced_stages": False,
            "recompute": "full",
            "recompute_layers": 1,
        },
        "dp2": {},
        "dp2 without overlap": {"overlap_grad_reduce": False, "overlap_param_gather": False},
        "dp2, compiled Adam": {"compiled_adam": True},
        "dp2, plain optimizer, compiled Adam": {"distributed_optimizer": False, "compiled_adam": True},
        "tp2, compiled Adam": {"tp": 2, "compiled_adam": True},
        "pp2, tied, compiled Adam": {"pp": 2, "compiled_adam": True},
        "dp2, micro-batch 2": {"micro_batch_size": 2},
        "tp2, selective recompute": {"tp": 2, "recompute": "selective"},
        "tp2, streamed cross-entropy": {"tp": 2, "streamed_cross_entropy": True},
        "tp2, streamed cross-entropy without sequence parallelism": {
            "tp": 2,
            "streamed_cross_entropy": True,
            "sequence_parallel": False,
        },
        "pp2, streamed cross-entropy": {"pp": 2, "streamed_cross_entropy": True},
        "tp2, selective recompute of core_attn, layernorm and mlp by our layers": {
            "tp": 2,
            "recompute": "selective",
            "recompute_modules": ["core_attn", "layernorm", "mlp"],
            "accumulate_weight_gradients": True,
            "compiled_regions": True,
        },
        "tp2, overlapped": {"tp": 2, "overlap_tensor_parallel": True, "compiled_regions": True},
        "tp2, gradients straight into the buffer": {
            "tp": 2,
            "accumulate_weight_gradients": True,
            "overlap_tensor_parallel": True,
            "streamed_cross_entropy": True,
        },
        "pp2, gradients straight into the buffer": {
            "pp": 2,
            "accumulate_weight_gradients": True,
            "streamed_cross_entropy": True,
        },
        "pp2, tied, gradients straight into the buffer": {
            "pp": 2,
            "accumulate_weight_gradients": True,
            "streamed_cross_entropy": True,
        },
        "pp2 vpp2, gradients straight into the buffer": {
            "pp": 2,
            "vpp": 2,
            "accumulate_weight_gradients": True,
            "streamed_cross_entropy": True,
        },
        "dp2, gradients straight into the buffer": {"accumulate_weight_gradients": True, "streamed_cross_entropy": True},
        "cp2": {"cp": 2},
        "cp2, streamed cross-entropy": {"cp": 2, "streamed_cross_entropy": True},
        "dp2, sharded, selective recompute of layernorm and mlp": {
            "fully_shard": True,
            "recompute": "selective",
            "recompute_modules": ["layernorm", "mlp"],
            "compiled_regions": True,
            "compiled_adam": True,
            "streamed_cross_entropy": True,
        },
        "dp2, tied, sharded": {"fully_shard": True, "streamed_cross_entropy": True},
        "cp2, sharded, full recompute": {"cp": 2, "fully_shard": True, "recompute": "full"},
    },
    4: {
        "tp2 pp2": {"tp": 2, "pp": 2},
        "tp2 pp2 without sequence parallelism": {"tp": 2, "pp": 2, "sequence_parallel": False},
        "tp2 cp2": {"tp": 2, "cp": 2},
        "dp4": {},
    },
    8: {
        "tp2 pp2 dp2": {"tp": 2, "pp": 2},
        "tp4 pp2": {"tp": 4, "pp": 2},
    },
}

FOR_LLAMA_ALONE = {
    "1 rank, plain optimizer",
    "1 rank, compiled Adam",
    "dp2, compiled Adam",
    "dp2, plain optimizer, compiled Adam",
    "1 rank, full recompute",
    "1 rank, full recompute of 1 layer",
    "pp2 even, full recompute of 1 layer",
    "1 rank, selective recompute of layernorm and mlp",
    "pp2, tied, streamed cross-entropy",
    "pp2, streamed cross-entropy",
    "tp2, streamed cross-entropy without sequence parallelism",
    "cp2, streamed cross-entropy",
    "pp2 vpp2",
    "dp2",
    "tp2, compiled Adam",
    "pp2, tied, compiled Adam",
    "1 rank, gradients straight into the buffer",
    "1 rank, tied, gradients straight into the buffer",
    "1 rank, wide vocabulary",
    "pp2, wide vocabulary",
    "pp2 even, wide vocabulary",
    "1 rank, plain optimizer and full recompute, gradients straight into the buffer",
    "pp2, gradients straight into the buffer",
    "pp2, tied, gradients straight into the buffer",
    "pp2 vpp2, gradients straight into the buffer",
    "dp2, gradients straight into the buffer",
    "dp2 without overlap",
    "dp2, micro-batch 2",
    "dp4",
    "tp2 pp2 dp2",
    "dp2, tied, sharded",
    "cp2, sharded, full recompute",
}
"""What has nothing to do with where the models differ: heads, and the bias of the joint projection."""


def variants_of(model, ranks):
    return {name: variant for name, variant in VARIANTS[ranks].items() if model == "llama" or name not in FOR_LLAMA_ALONE}


def variant_plan(folder, model, ranks, variant):
    """Two micro-batches per step, where the layout leaves one replica or two and the variant does not say otherwise."""
    layout = f"parallelism.minimal_communication.{model}.cpu"
    replicas = ranks // prod(size for key, size in variant.items() if key in {"tp", "pp", "cp"})
    micro_batch = max(1, SEQUENCES // replicas // 2)
    settings = {**COMMON, "hardware.platforms.cpu.gpus_per_node": ranks, f"{layout}.micro_batch_size": micro_batch}
    for key, value in variant.items():
        if key in DIVISION:
            settings[f"{layout}.{DIVISION[key]}"] = value
        elif key in {"sequence_parallel", "micro_batch_size"}:
            settings[f"{layout}.{key}"] = value
        elif key.startswith("recompute"):
            settings[f"{OPTIONS}.{key}"] = value
        else:
            settings[f"{OPTIONS}.engine_options.{key}"] = value
    plan = make_plan(folder, model, settings)
    if "wide" in folder.name:
        return replace(plan, shape=replace(plan.shape, vocabulary=4096))
    return replace(plan, shape=replace(plan.shape, tied_embeddings=True)) if "tied" in folder.name else plan


def reference_of(name):
    return next((f"1 rank, {model}" for model in ("tied", "wide vocabulary") if model in name), "1 rank")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every variant of both models."""
    folder = tmp_path_factory.mktemp("layouts")
    plans = {
        (model, name): variant_plan(folder / f"{model} {name}".replace(" ", "-"), model, ranks, variant)
        for ranks, variants in VARIANTS.items()
        for model in ("llama", "qwen")
        for name, variant in variants_of(model, ranks).items()
    }
    return dict(zip(plans, train_together(list(plans.values())), strict=True))


CASES = [(model, name) for model in ("llama", "qwen") for ranks in VARIANTS for name in variants_of(model, ranks)]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_losses_and_gradient_norms_do_not_depend_on_the_layout(trained, model, name):
    _, reference = trained[model, reference_of(name)]
    _, steps = trained[model, name]
    assert len(steps) == STEPS
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in reference], abs=1e-5)
    assert [step.grad_norm for step in steps] == pytest.approx([step.grad_norm for step in reference], rel=1e-4)


@pytest.mark.parametrize(("model", "name"), CASES)
def test_what_ran_is_read_back_and_agrees_with_the_plan(trained, model, name):
    run, steps = trained[model, name]
    assert run.mismatches == ()
    assert run.evidence.tokens_per_step == SEQUENCES * 32
    assert {step.tokens for step in steps} == {SEQUENCES * 32}
    reference = trained[model, reference_of(name)][0].evidence
    assert (run.evidence.parameters, run.evidence.first_sequence) == (reference.parameters, reference.first_sequence)
    assert run.outcome == "completed"


@pytest.mark.parametrize(("model", "name"), CASES)
def test_it_is_seen_in_the_weights_whether_replicas_share_them(trained, model, name):
    evidence = trained[model, name][0].evidence
    assert evidence.weights_split_over == (2 if "sharded" in name else 1)
    assert evidence.optimizer.endswith(" over 1/2 of each weight") == ("sharded" in name)
    assert evidence.gradient_dtype == "float32"


@pytest.mark.parametrize(("model", "name"), CASES)
def test_recomputation_and_sequence_parallelism_are_seen_in_the_layers(trained, model, name):
    evidence = trained[model, name][0].evidence
    assert evidence.recompute == ("full" if "full" in name else "selective" if "selective" in name else "none")
    assert evidence.recompute_layers == (1 if "of 1 layer" in name else None)
    modules = [module for module in ("core_attn", "layernorm", "mlp") if module in name]
    assert evidence.recompute_modules == (tuple(modules or ["core_attn"]) if "selective" in name else None)
    assert evidence.sequence_parallel == ("tp" in name and "without sequence" not in name)
    assert {evidence.grades[fact] for fact in ("recompute", "sequence_parallel", "matmul_dtype", "data")} == {"observed"}


def test_the_losses_fall(trained):
    for model in ("llama", "qwen"):
        _, steps = trained[model, "1 rank"]
        assert steps[-1].loss < steps[0].loss - 0.1


def test_evidence_tells_layouts_apart(trained):
    deep, with_sp = trained["llama", "tp4 pp2"][0].evidence, trained["llama", "tp2 pp2"][0].evidence
    without = trained["llama", "tp2 pp2 without sequence parallelism"][0].evidence
    assert (deep.tensor_parallel, deep.pipeline_parallel, deep.data_parallel) == (4, 2, 1)
    assert (with_sp.sequence_parallel, without.sequence_parallel) == (True, False)
    assert trained["llama", "pp2 vpp2"][0].evidence.virtual_pipeline == 2
    assert trained["llama", "1 rank, plain optimizer"][0].evidence.optimizer.startswith("FP32Optimizer")


def test_evidence_names_the_attention_that_ran(trained):
    whole, parts = (trained["llama", name][0].evidence.attention for name in ("tp2 pp2", "cp2"))
    assert parts.endswith("scaled_dot_product_attention, flash_attention in two parts")
    assert "in two parts" not in whole


def test_the_last_stage_gets_fewer_layers_for_its_output_layer(trained):
    assert any("has 1 of 4 layers" in note for note in trained["llama", "pp2, wide vocabulary"][0].evidence.notes)
    assert not any("stage" in note for note in trained["llama", "pp2 even, wide vocabulary"][0].evidence.notes)
