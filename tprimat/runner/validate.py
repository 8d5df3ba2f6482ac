"""Plan every model x platform x strategy of a configuration, without running anything."""

from collections.abc import Iterator
from pathlib import Path

from tprimat.config.load import LoadedConfig, Setting, read_config
from tprimat.config.schema import Size
from tprimat.core.accelerators import PlatformName
from tprimat.core.errors import UserError
from tprimat.engines import FALLBACK
from tprimat.plan.build import PlanRequest
from tprimat.plan.schema import RunPlan
from tprimat.runner.session import plan_run

PLATFORM_ORDER: tuple[PlatformName, ...] = ("nvidia", "amd", "cpu")
Place = tuple[str, PlatformName, str]
"""Model, platform, strategy."""


def check_configuration(config: Path | None, gpus: int | None) -> Iterator[tuple[Place, RunPlan | UserError]]:
    """Plan each cell of a configuration, by default TPrimat's own and with the number of GPUs that it states.

    `gpus` says how many GPUs a node has instead; on a CPU the processes stay those of the configuration.

    Raises:
        ConfigError: the file itself is wrong.
    """
    for platform in PLATFORM_ORDER:
        size: Size = "tiny" if platform == "cpu" else "full"
        settings = []
        if gpus and platform != "cpu":
            settings.append(Setting(("hardware", "platforms", platform, "gpus_per_node"), gpus, "--gpus"))
        loaded = read_config(config, size=size, settings=settings)
        if platform in loaded.config.hardware.platforms:
            for strategy in loaded.config.parallelism:
                for model in loaded.config.models:
                    yield (model, platform, strategy), _planned(loaded, model, platform, strategy, size)


def _planned(loaded: LoadedConfig, model: str, platform: PlatformName, strategy: str, size: Size) -> RunPlan | UserError:
    request = PlanRequest(
        model=model,
        strategy=strategy,
        platform=platform,
        size=size,
        engine=FALLBACK,
        engine_reason="",
        gpus_found=None,
    )
    try:
        return plan_run(loaded, request)
    except UserError as error:
        return error
