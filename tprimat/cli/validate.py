"""./validate_config.py: the whole matrix of a configuration, valid or why not."""

import argparse
import sys
from pathlib import Path

from tprimat.config.load import LoadedConfig, Setting, read_config
from tprimat.config.schema import PlatformName, Size
from tprimat.engines import FALLBACK
from tprimat.errors import UserError
from tprimat.plan.build import PlanRequest
from tprimat.plan.schema import RunPlan
from tprimat.runner.session import plan_run


def main(arguments: list[str] | None = None) -> int:
    """Print one line a cell.

    Returns:
        0 all cells are valid, 1 some are not, 2 the file itself is wrong.
    """
    parser = argparse.ArgumentParser(
        description="Check every model x platform x strategy of a configuration.", allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, help="instead of config.yaml")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs on each node (default: what the file says, else 8)")
    options = parser.parse_args(arguments)
    try:
        return 1 if _print_matrix(options.config, options.gpus) else 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _print_matrix(path: Path | None, gpus: int | None) -> int:
    """Returns: the number of cells that are not valid."""
    failures: list[UserError] = []
    cells = 0
    for platform in ("nvidia", "amd", "cpu"):
        size: Size = "tiny" if platform == "cpu" else "full"
        settings = [Setting(("hardware", "platforms", platform, "gpus_per_node"), gpus, "--gpus")] if gpus else []
        loaded = read_config(path, size=size, settings=settings)
        if platform not in loaded.config.hardware.platforms:
            continue
        for strategy in loaded.config.parallelism:
            for model in loaded.config.models:
                cells += 1
                text, error = _cell(loaded, model, platform, strategy)
                print(f"{model:<12} {platform:<7} {strategy:<24} {text}")
                failures += [error] if error else []
    for error in failures:
        print(f"\nerror: {error}", file=sys.stderr)
    print(f"{cells - len(failures)} of {cells} valid")
    return len(failures)


def _cell(loaded: LoadedConfig, model: str, platform: PlatformName, strategy: str) -> tuple[str, UserError | None]:
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
        return f"not valid: {error.what}", error
    return f"valid: {_described(plan)}", None


def _described(plan: RunPlan) -> str:
    layout, steps = plan.layout, plan.batch.accumulation_steps or "auto"
    return f"TP={layout.tensor} PP={layout.pipeline} DP={layout.data} on {layout.world_size}, GradAccum={steps}"
