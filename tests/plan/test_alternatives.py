from plans import request_of

from tprimat.config.load import Setting, read_config
from tprimat.plan.build import build_plan, strategies_with_less_memory


def alternatives(model, strategy, *, gpus=8, **settings):
    overlay = [Setting(tuple(key.split("__")), value, "test") for key, value in settings.items()]
    overlay.append(Setting(("hardware", "platforms", "nvidia", "gpus_per_node"), gpus, "test"))
    loaded = read_config(size="full", settings=overlay, environment={})
    return strategies_with_less_memory(loaded, build_plan(loaded, request_of(model, strategy, gpus_found=gpus)))


def test_the_strategy_that_splits_the_model_least_further_comes_first():
    assert alternatives("llama", "minimal_communication") == (
        "balanced",
        "maximum_performance",
        "truly_identical",
        "memory_optimized",
    )


def test_only_a_further_split_of_the_model_counts():
    assert alternatives("llama", "truly_identical") == ("memory_optimized",)
    assert alternatives("llama", "memory_optimized") == ()


def test_a_strategy_that_these_ranks_cannot_run_is_not_suggested():
    assert alternatives("llama", "minimal_communication", gpus=2) == ("balanced",)
    assert alternatives("llama", "minimal_communication", gpus=1) == ()


def test_a_strategy_with_a_larger_micro_batch_is_not_suggested():
    larger = {"parallelism__balanced__llama__nvidia__micro_batch_size": 2}
    assert "balanced" not in alternatives("llama", "minimal_communication", **larger)
