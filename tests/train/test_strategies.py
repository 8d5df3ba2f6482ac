"""All five strategies of config.yaml train both models, unshortened, with 8 ranks on a CPU."""

from dataclasses import replace

import pytest
from planning import make_plan, train_together

STRATEGIES = ("maximum_performance", "truly_identical", "memory_optimized", "minimal_communication", "balanced")
CASES = [(model, strategy) for model in ("llama", "qwen") for strategy in STRATEGIES]
SETTINGS = {
    "training.duration.max_steps": 2,
    "training.data.global_batch_size": 8,
    "training.data.sequence_length": 32,
}
EXPECTED = {  # TP, PP, DP of the contract for a node of 8
    ("llama", "maximum_performance"): (4, 1, 2),
    ("llama", "truly_identical"): (4, 1, 2),
    ("llama", "memory_optimized"): (4, 2, 1),
    ("llama", "minimal_communication"): (1, 1, 8),
    ("llama", "balanced"): (2, 1, 4),
    ("qwen", "maximum_performance"): (4, 2, 1),
    ("qwen", "truly_identical"): (4, 2, 1),
    ("qwen", "memory_optimized"): (4, 2, 1),
    ("qwen", "minimal_communication"): (1, 1, 8),
    ("qwen", "balanced"): (2, 2, 2),
}


def strategy_plan(folder, model, strategy):
    """Micro-batches as large as a step allows: their number is what costs time on a CPU."""
    _, pipeline, data = EXPECTED[model, strategy]
    micro_batch = SETTINGS["training.data.global_batch_size"] // (data * pipeline)
    settings = {**SETTINGS, f"parallelism.{strategy}.{model}.cpu.micro_batch_size": micro_batch}
    return make_plan(folder, model, settings, strategy=strategy, layers=None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("strategies")
    plans = {(model, name): strategy_plan(folder / f"{model}-{name}", model, name) for model, name in CASES}
    distinct = {what_is_trained(plan): plan for plan in plans.values()}
    results = dict(zip(distinct, train_together(list(distinct.values())), strict=True))
    return {case: results[what_is_trained(plan)] for case, plan in plans.items()}


def what_is_trained(plan):
    """All of a plan but its names: strategies that ask for the same in a node of 8 are trained once."""
    return repr(replace(plan, strategy="", run_id="", run_directory="", output_directory=""))


def test_strategies_that_ask_for_the_same_are_few(tmp_path):
    plans = [strategy_plan(tmp_path / f"{model}-{name}", model, name) for model, name in CASES]
    assert len({what_is_trained(plan) for plan in plans}) == 7


@pytest.mark.parametrize(("model", "strategy"), CASES)
def test_a_strategy_trains_under_the_layout_of_the_contract(trained, model, strategy):
    run, steps = trained[model, strategy]
    evidence = run.evidence
    assert (evidence.tensor_parallel, evidence.pipeline_parallel, evidence.data_parallel) == EXPECTED[model, strategy]
    assert run.mismatches == ()
    assert len(steps) == 2
    assert all(step.finite and step.loss is not None for step in steps)


@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_all_strategies_train_the_same_model(trained, model):
    losses = [[step.loss for step in trained[model, strategy][1]] for strategy in STRATEGIES]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-4)
