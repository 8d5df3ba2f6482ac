"""Which products the probes measure follows from the configuration."""

from dataclasses import replace

from tprimat.config.load import load_config
from tprimat.runner.probes import workloads_of


def test_the_shipped_configuration_asks_for_both_models_under_every_split_of_its_strategies():
    workloads = workloads_of(load_config(), "nvidia")
    assert [(work.model, work.tensor_parallel, work.sequence) for work in workloads] == [
        ("llama", (1, 2, 4), 2048),
        ("qwen", (1, 2, 4), 2048),
    ]


def test_a_layout_with_its_own_micro_batch_is_a_workload_of_its_own():
    config = load_config()
    strategy = dict(config.parallelism["balanced"])
    layout = replace(strategy["llama"]["nvidia"], micro_batch_size=3)
    strategy["llama"] = strategy["llama"] | {"nvidia": layout}
    changed = replace(config, parallelism=config.parallelism | {"balanced": strategy})
    found = [(work.micro_batch, work.tensor_parallel) for work in workloads_of(changed, "nvidia") if work.model == "llama"]
    assert found == [(1, (1, 4)), (3, (2,))]
