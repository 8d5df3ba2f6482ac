"""Mixtures of experts: the same losses and gradient norms however experts, tokens and layers are spread over ranks."""

import pytest
from changes import replace
from planning import STEPS, make_plan, split_settings, train_together

from tprimat.core.models import model_shape, tiny

CAPACITY, ROUTING = "training.moe_expert_capacity_factor", "training.routing"
STRAIGHT = {"accumulate_weight_gradients": True}
"""As a GPU has by default."""

SHAPES = {
    "mixtral": replace(tiny(model_shape("mixtral-8x7b")), layers=4),
    "qwen": replace(tiny(model_shape("qwen3-30b-a3b")), layers=4, experts=16, experts_per_token=4),
    "lite": replace(tiny(model_shape("deepseek-v2-lite")), layers=4, heads=8, kv_heads=8, experts=16),
    "v3": replace(tiny(model_shape("deepseek-v3")), layers=4, hidden=64, heads=8, kv_heads=8, experts=16, dense_first_layers=2),
}
"""Two models with whole weights, two with latent attention, shared experts and dense first layers."""

CASES = {
    "mixtral": [
        (1, {}),
        (4, {"ep": 2, "tp": 2}),
        (4, {"ep": 2, "pp": 2}),
        (2, {"ep": 2, "distributed_optimizer": False, "recompute": "full"}),
        (2, {"tp": 2}),
        (2, {"ep": 2, ROUTING: "balanced"}),
        (1, {CAPACITY: 0.75}),
        (2, {"ep": 2, CAPACITY: 0.75, "recompute_modules": ["moe"]}),
        (1, {CAPACITY: 100.0}),
    ],
    "qwen": [(1, {}), (4, {"ep": 4, "tp": 2, **STRAIGHT}), (2, {"ep": 2, "cp": 2})],
    "lite": [
        (1, {}),
        (2, {"pp": 2, **STRAIGHT, "recompute_modules": ["moe", "layernorm", "mlp"]}),
        (1, {"recompute_modules": ["shared_experts", "mla_up_proj"]}),
    ],
    "v3": [(1, {}), (4, {"ep": 4, "tp": 2}), (2, {"pp": 2, "vpp": 2})],
}
"""Ranks, and how the model is spread over them; the first is the reference."""

BALANCED, DROPPING, DROPPING_SPREAD, ROOMY = range(len(CASES["mixtral"]) - 4, len(CASES["mixtral"]))
"""The cases with forced balance and with full experts, whose losses are their own, and one whose experts are never full."""
OF_THEIR_OWN = {("mixtral", BALANCED): 0, ("mixtral", DROPPING): 0, ("mixtral", DROPPING_SPREAD): DROPPING}


def plan_of(folder, model, ranks, case):
    split = {key: value for key, value in case.items() if key != "recompute_modules"}
    plan = make_plan(folder, "mixtral", split_settings("mixtral", ranks, split))
    plan = replace(plan, shape=SHAPES[model])
    modules = tuple(sorted(case.get("recompute_modules", ())))
    return replace(plan, recompute="selective", recompute_modules=modules) if modules else plan


NAMES = [(model, number) for model, cases in CASES.items() for number in range(len(cases))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every case."""
    folder = tmp_path_factory.mktemp("experts")
    plans = {(model, number): plan_of(folder / f"{model}-{number}", model, *CASES[model][number]) for model, number in NAMES}
    return dict(zip(plans, train_together(list(plans.values())), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "number"), [name for name in NAMES if OF_THEIR_OWN.get(name) != 0])
def test_losses_and_gradient_norms_do_not_depend_on_where_the_experts_are(trained, model, number):
    (run, steps), (_, reference) = trained[model, number], trained[model, OF_THEIR_OWN.get((model, number), 0)]
    assert len(steps) == STEPS
    assert run.mismatches == ()
    assert run.ran.expert_parallel == CASES[model][number][1].get("ep", 1)
    assert run.ran.recompute_modules == (tuple(sorted(CASES[model][number][1].get("recompute_modules", ()))) or None)
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in reference], abs=1e-5)
    assert [step.grad_norm for step in steps] == pytest.approx([step.grad_norm for step in reference], rel=1e-4)


@pytest.mark.slow
def test_the_load_of_experts_and_ranks_is_recorded(trained):
    for model, number in NAMES:
        experts, (_, steps) = SHAPES[model].experts, trained[model, number]
        spread = CASES[model][number][1].get("ep", 1)
        for step in steps:
            assert 1 <= step.rank_load <= spread
            assert step.rank_load <= step.expert_load <= experts
            assert (step.rank_load > 1) == (spread > 1)
            assert (0 < step.dropped < 1) if model == "mixtral" and number in {DROPPING, DROPPING_SPREAD} else step.dropped == 0


@pytest.mark.slow
def test_forced_balance_is_recorded_and_more_even(trained):
    (natural, uneven), (forced, even) = trained["mixtral", 1], trained["mixtral", BALANCED]
    assert (
        (natural.evidence.workload.routing, forced.evidence.workload.routing)
        == (natural.ran.routing, forced.ran.routing)
        == ("natural", "balanced")
    )
    assert forced.mismatches == ()
    assert sum(step.expert_load for step in even) < sum(step.expert_load for step in uneven)


@pytest.mark.slow
def test_a_capacity_drops_choices_and_is_recorded(trained):
    (run, steps), (spread, same) = trained["mixtral", DROPPING], trained["mixtral", DROPPING_SPREAD]
    assert run.ran.expert_capacity == spread.evidence.workload.expert_capacity == 0.75
    assert trained["mixtral", ROOMY][0].evidence.workload.expert_capacity == 100
    assert trained["mixtral", 0][0].evidence.workload.expert_capacity == "unlimited"
    assert [step.dropped for step in steps] == pytest.approx([step.dropped for step in same])
    assert steps[0].dropped >= 0.25  # three of four choices have room, were all even
    assert [step.loss for step in steps] != pytest.approx([step.loss for step in trained["mixtral", 0][1]], abs=1e-5)
    losses = [[step.loss for step in trained["mixtral", number][1]] for number in (0, ROOMY)]
    assert losses[0] == losses[1]  # to the last bit
