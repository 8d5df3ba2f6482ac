"""Plan every model x platform x strategy of a configuration, without running anything."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tprimat.config.load import LoadedConfig, Setting, read_config
from tprimat.config.schema import Size
from tprimat.core.accelerators import PlatformName
from tprimat.core.errors import MissingLayoutError, UserError
from tprimat.engines import FALLBACK
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

    @property
    def left_out(self) -> bool:
        """Return whether the strategy has no layout for the model, which is not a failure."""
        return isinstance(self.error, MissingLayoutError)


def check_configuration(config: Path | None, gpus: int | None) -> Iterator[CheckedCell]:
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
                    yield _checked(loaded, model, platform, strategy)


def _checked(loaded: LoadedConfig, model: str, platform: PlatformName, strategy: str) -> CheckedCell:
    request = PlanRequest(
        model=model,
        strategy=strategy,
        platform=platform,
        size="tiny" if platform == "cpu" else "full",
        engine=FALLBACK,
        engine_reason="",
        gpus_found=None,
    )
    error = None
    try:
        work = plan_run(loaded, request).workload
    except UserError as wrong:
        error = wrong
        text = f"{'left out' if isinstance(wrong, MissingLayoutError) else 'not valid'}: {wrong.what}"
    else:
        layout = work.layout
        experts = f" EP={layout.expert}" if layout.expert > 1 else ""
        degrees = f"TP={layout.tensor} PP={layout.pipeline} DP={layout.data}{experts} on {layout.world_size}"
        text = f"valid: {degrees}, GradAccum={work.accumulation_steps}"
    return CheckedCell(model=model, platform=platform, strategy=strategy, description=text, error=error)
