"""Which matrix products the models of a configuration consist of, so that the probes measure those."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tprimat.config.schema import Config, LayoutConfig
    from tprimat.facts.platforms import Backend, PlatformName
    from tprimat.probe.gemm import Workload

MICRO_BATCH_WHEN_AUTO = 4


def configured(path: Path | None, backend: "Backend") -> "tuple[Workload, ...] | None":
    """Of a configuration file that is named, or of TPrimat's own; None where that one does not exist here.

    Raises:
        ConfigError: the file is not a valid configuration.
    """
    from tprimat.config.load import DEFAULT_FILE, load_config
    from tprimat.facts.platforms import PLATFORM_OF

    file = path or DEFAULT_FILE
    return workloads_of(load_config(file), PLATFORM_OF[backend]) if path or file.is_file() else None


def workloads_of(config: "Config", platform: "PlatformName") -> "tuple[Workload, ...]":
    """Every model under every tensor-parallel degree and micro-batch that its strategies give it on a platform."""
    from tprimat.plan.build import shape_of
    from tprimat.probe.gemm import Workload

    data = config.training.data
    found = []
    for key, model in config.models.items():
        degrees: dict[int, set[int]] = {}
        for layout in layouts_of(config, key, platform):
            micro_batch = layout.micro_batch_size or data.micro_batch_size
            sequences = MICRO_BATCH_WHEN_AUTO if micro_batch == "auto" else micro_batch
            degrees.setdefault(sequences, set()).add(layout.tensor_model_parallel_size)
        found += [
            Workload(
                model=key,
                shape=shape_of(model, "full"),
                tensor_parallel=tuple(sorted(ranks)),
                micro_batch=sequences,
                sequence=data.sequence_length,
            )
            for sequences, ranks in sorted(degrees.items())
        ]
    return tuple(found)


def layouts_of(config: "Config", model: str, platform: "PlatformName") -> "list[LayoutConfig]":
    """Of one model, in all strategies that name it."""
    return [models[model][platform] for models in config.parallelism.values() if model in models and platform in models[model]]
