"""Plan every cell of a configuration without running anything, to tell which cells are valid."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tprimat.config.load import LoadedConfig, Setting, read_config
from tprimat.config.schema import Size
from tprimat.engines import FALLBACK
from tprimat.errors import UserError
from tprimat.facts.platforms import PlatformName
from tprimat.plan.build import PlanRequest
from tprimat.runner.session import plan_run

PLATFORM_ORDER: tuple[PlatformName, ...] = ("nvidia", "amd", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCell:
    """A model under a strategy on a platform."""

    model: str
    platform: PlatformName
    strategy: str
    description: str
    error: UserError | None = None


def check_matrix(config: Path | None, gpus: int | None) -> Iterator[CheckedCell]:
    """Plan each cell.

    Args:
        config: the file; None for TPrimat's own.
        gpus: on each node; None for what the file says.

    Raises:
        ConfigError: the file itself is wrong.
    """
    for platform in PLATFORM_ORDER:
        size: Size = "tiny" if platform == "cpu" else "full"
        settings = [Setting(("hardware", "platforms", platform, "gpus_per_node"), gpus, "--gpus")] if gpus else []
        loaded = read_config(config, size=size, settings=settings)
        if platform in loaded.config.hardware.platforms:
            for strategy in loaded.config.parallelism:
                for model in loaded.config.models:
                    yield _check(loaded, model, platform, strategy)


def _check(loaded: LoadedConfig, model: str, platform: PlatformName, strategy: str) -> CheckedCell:
    request = PlanRequest(
        model=model,
        strategy=strategy,
        platform=platform,
        size="tiny" if platform == "cpu" else "full",
        engine=FALLBACK,
        engine_reason="",
        gpus_found=None,
        run_id="",
        run_directory="",
        output_directory="",
    )
    try:
        plan = plan_run(loaded, request)
    except UserError as error:
        text = f"not valid: {error.what}"
        return CheckedCell(model=model, platform=platform, strategy=strategy, description=text, error=error)
    layout, accumulation = plan.layout, plan.batch.accumulation_steps or "auto"
    degrees = f"TP={layout.tensor} PP={layout.pipeline} DP={layout.data} on {layout.world_size}"
    text = f"valid: {degrees}, GradAccum={accumulation}"
    return CheckedCell(model=model, platform=platform, strategy=strategy, description=text)
