"""Check every model x platform x strategy of a configuration."""

import argparse
import sys
from pathlib import Path

from tprimat.core.errors import MissingLayoutError, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="instead of config.yaml")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs per node, ignored on a CPU (default: from the file, otherwise 8)"
    )


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 all cells are valid, 1 some are not."""
    from tprimat.plan.schema import RunPlan
    from tprimat.report.tables import screen_of
    from tprimat.runner.run import announcement
    from tprimat.runner.validate import check_configuration

    cells, screen = list(check_configuration(options.config, options.gpus)), screen_of(sys.stdout)
    alike: dict[tuple[str | None, ...], list[UserError]] = {}
    left_out = 0
    for (model, platform, strategy), plan in cells:
        name = f"{model:<10} {platform:<6} {strategy:<22} "
        if isinstance(plan, RunPlan):
            layout = announcement(plan).partition("Parallelism: ")[2]
            print(screen.prose(f"{name}valid: {layout} on {plan.workload.layout.world_size}", len(name)))
        elif isinstance(plan, MissingLayoutError):
            left_out += 1
            print(screen.prose(f"{name}left out: {plan.what}", len(name)))
        else:
            alike.setdefault((plan.what, plan.why, plan.fix), []).append(plan)
            print(screen.prose(f"{name}not valid: {plan.what}", len(name), "refused"))
    for errors in alike.values():
        more = f"\n  {len(errors) - 1} more cells have the same problem" if len(errors) > 1 else ""
        print(f"\nerror: {errors[0]}{more}", file=sys.stderr)
    failures, defined = sum(map(len, alike.values())), len(cells) - left_out
    print(f"{defined - failures} of {defined} valid" + (f", {left_out} left out" if left_out else ""))
    return 1 if failures else 0
