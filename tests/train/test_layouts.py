"""The same model, the same batches: the same losses and gradient norms in every layout."""

import argparse
from math import prod
from pathlib import Path

import pytest
from changes import replace
from planning import SEQUENCES, STEPS, TOKENS, make_plan, split_settings, train_together

DATA = {"training.data.dataset": f"text:{Path(argparse.__file__)}"}
"""One file of text: each of many ranks reads all of it."""
STRAIGHT = {"accumulate_weight_gradients": True}
"""As a GPU has by default: weight gradients go straight into the buffer, those of the output layer, too."""
CASES = {
    "1 rank": ("llama", 1, {}),
    "1 rank, tied": ("llama", 1, {}),
    "1 rank, wide vocabulary": ("llama", 1, {}),
    "dp2, straight, late rank": ("llama", 2, STRAIGHT),
    "dp2, plain optimizer, full recompute, straight": (
        "llama",
        2,
        {**STRAIGHT, "distributed_optimizer": False, "recompute": "full"},
    ),
    "dp2, sharded, selective recompute of layernorm and mlp": (
        "llama",
        2,
        {"fully_shard": True, "recompute": "selective", "recompute_modules": ["layernorm", "mlp"]},
    ),
    "dp2, tied, sharded": ("llama", 2, {"fully_shard": True}),
    "tp2 without sequence parallelism": ("llama", 2, {"tp": 2, "sequence_parallel": False}),
    "pp2, wide vocabulary": ("llama", 2, {"pp": 2}),
    "pp2 even, wide vocabulary, full recompute of 1 layer": (
        "llama",
        2,
        {"pp": 2, "balanced_stages": False, "recompute": "full", "recompute_layers": 1},
    ),
    "pp2, tied, straight": ("llama", 2, {"pp": 2, **STRAIGHT}),
    "pp2 vpp2, straight": ("llama", 2, {"pp": 2, "vpp": 2, **STRAIGHT}),
    "cp2": ("llama", 2, {"cp": 2}),
    "cp2, sharded, full recompute": ("llama", 2, {"cp": 2, "fully_shard": True, "recompute": "full"}),
    "tp2 pp2": ("llama", 4, {"tp": 2, "pp": 2}),
    "qwen, 1 rank": ("qwen", 1, {}),
    "qwen, tp2, overlapped, straight": ("qwen", 2, {"tp": 2, "overlap_tensor_parallel": True, **STRAIGHT}),
    "qwen, tp2, selective recompute of core_attn, layernorm and mlp, straight": (
        "qwen",
        2,
        {"tp": 2, **STRAIGHT, "recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]},
    ),
    "qwen, tp2 cp2": ("qwen", 4, {"tp": 2, "cp": 2}),
    "qwen, tp4 pp2": ("qwen", 8, {"tp": 4, "pp": 2}),
}
"""Model, ranks, and how it is split and trained. Qwen has other heads than Llama, and a bias of the joint projection."""


def variant_plan(folder, model, ranks, variant):
    """Two micro-batches per step, where the layout leaves one replica or two."""
    replicas = ranks // prod(size for key, size in variant.items() if key in {"tp", "pp", "cp"})
    settings = split_settings(model, ranks, DATA | variant, micro_batch=max(1, SEQUENCES // replicas // 2))
    plan = make_plan(folder, model, settings)
    if "wide" in folder.name:
        return replace(plan, shape=replace(plan.workload.shape, vocabulary=4096))
    return replace(plan, shape=replace(plan.workload.shape, tied_embeddings=True)) if "tied" in folder.name else plan


def reference_of(name):
    references = {"tied": "1 rank, tied", "wide": "1 rank, wide vocabulary", "qwen": "qwen, 1 rank"}
    return next((reference for word, reference in references.items() if word in name), "1 rank")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every case."""
    folder = tmp_path_factory.mktemp("layouts")
    plans = {name: variant_plan(folder / name.replace(" ", "-"), *case) for name, case in CASES.items()}
    return dict(zip(plans, train_together(list(plans.values())), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradient_norms_do_not_depend_on_the_layout(trained, name):
    _, reference = trained[reference_of(name)]
    _, steps = trained[name]
    assert len(steps) == STEPS
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in reference], abs=1e-5)
    assert [step.grad_norm for step in steps] == pytest.approx([step.grad_norm for step in reference], rel=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_what_ran_is_read_back_and_agrees_with_the_plan(trained, name):
    run, steps = trained[name]
    assert run.mismatches == ()
    assert run.evidence.tokens_per_step == SEQUENCES * TOKENS
    assert {step.tokens for step in steps} == {SEQUENCES * TOKENS}
    reference = trained[reference_of(name)][0].evidence
    assert (run.evidence.parameters, run.evidence.first_sequence) == (reference.parameters, reference.first_sequence)
    assert run.outcome == "completed"


def test_a_rank_that_takes_longer_is_told_from_one_that_waits_for_it(trained):
    """Their steps end together. The late one loses 0.2 s with each of two micro-batches before it has gradients to exchange."""
    usual, late = trained["dp2, straight, late rank"][0].rank_seconds
    assert late - usual > 0.35


@pytest.mark.parametrize("name", CASES)
def test_sharing_recomputation_and_sequence_parallelism_are_read_back_with_their_grades(trained, name):
    evidence = trained[name][0].evidence
    assert evidence.workload.weights_split_over == (2 if "sharded" in name else 1)
    assert evidence.workload.optimizer.endswith(" over 1/2 of each weight") == ("sharded" in name)
    assert evidence.workload.gradient_dtype == "float32"
    assert evidence.workload.recompute == ("full" if "full" in name else "selective" if "selective" in name else "none")
    assert evidence.workload.recompute_layers == (1 if "of 1 layer" in name else None)
    modules = [module for module in ("core_attn", "layernorm", "mlp") if module in name]
    assert evidence.workload.recompute_modules == (tuple(modules or ["core_attn"]) if "selective" in name else None)
    assert evidence.workload.sequence_parallel == ("tp" in name and "without sequence" not in name)
    assert {evidence.grades[fact] for fact in ("weights_split_over", "matmul_dtype", "data")} == {"observed"}
    assert {evidence.grades[fact] for fact in ("recompute", "sequence_parallel")} == {"resolved"}
