"""The commands that check: this machine, and a configuration."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.common import print_json
from tprimat.core.errors import MissingLayoutError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tprimat.runner.doctor import Check


def doctor(options: argparse.Namespace) -> int:
    """Exit status: 0 some engine can train, 1 none can."""
    from tprimat.config.load import environment_choices
    from tprimat.runner.doctor import examine

    choices = environment_choices()
    checks, can_train = examine(Path(choices.output_directory), choices.primus_path)
    if options.json:
        print_json({"can_train": can_train, "checks": [dataclasses.asdict(check) for check in checks]})
        return 0 if can_train else 1
    show_checks(checks)
    problems = sum(check.status == "problem" for check in checks)
    verdict = "This machine can train" if can_train else "Nothing can train here"
    print(f"\n{verdict}; {problems or 'no'} problem{'' if problems == 1 else 's'} found.")
    return 0 if can_train else 1


def show_checks(checks: "Iterable[Check]") -> None:
    """Print checks: status, name and finding, and what to do below it; of several in a row that need the same, below the last."""
    from tprimat.report.tables import screen_of

    screen, every = screen_of(sys.stdout), list(checks)
    for place, check in enumerate(every, 1):
        name = f"{check.status:<8} {check.name:<19} "
        print(screen.prose(name + check.finding, len(name)))
        if check.fix and check.fix not in {following.fix for following in every[place : place + 1]}:
            print(screen.prose(f"{'':<{len(name)}}try: {check.fix}", len(name) + len("try: ")))


def validate(options: argparse.Namespace) -> int:
    """Exit status: 0 all cells are valid, 1 some are not."""
    from tprimat.core.units import gibibytes
    from tprimat.plan.schema import RunPlan
    from tprimat.report.tables import screen_of
    from tprimat.runner.checks import check_configuration, faster_than_best
    from tprimat.runner.prediction import gate
    from tprimat.runner.run import announcement

    cells, screen = list(check_configuration(options.config, options.gpus, options.gpu)), screen_of(sys.stdout)
    alike: dict[tuple[str | None, ...], list[UserError]] = {}
    left_out = 0
    too_large: list[str] = []
    for asked, plan, machine in cells:
        name = f"{asked.model:<10} {asked.platform:<6} {asked.strategy:<22} "
        if isinstance(plan, RunPlan):
            verdict, said = "valid", f"{announcement(plan).partition('Parallelism: ')[2]} on {plan.workload.layout.world_size}"
            if machine is not None and (gated := gate(plan, machine)) is not None:
                fit, need = gated
                said += f", {gibibytes(need.expected_device_bytes)}, at most {gibibytes(need.device_bytes)}"
                said += f" of {gibibytes(machine.memory_bytes)}"
                verdict = verdict if fit == "fits" else fit
                too_large += [machine.accelerator or ""] if fit == "does not fit" else []
            print(screen.prose(f"{name}{verdict}: {said}", len(name)))
        elif isinstance(plan, MissingLayoutError):
            left_out += 1
            print(screen.prose(f"{name}left out: {plan.what}", len(name)))
        else:
            alike.setdefault((plan.what, plan.why, plan.fix), []).append(plan)
            print(screen.prose(f"{name}not valid: {plan.what}", len(name)))
    for errors in alike.values():
        more = f"\n  {len(errors) - 1} more cells have the same problem" if len(errors) > 1 else ""
        print(f"\nerror: {errors[0]}{more}", file=sys.stderr)
    for there in sorted({machine for _, _, machine in cells if machine is not None}, key=lambda one: one.platform):
        plans = [plan for _, plan, machine in cells if machine == there and isinstance(plan, RunPlan)]
        for line in faster_than_best(plans, there):
            print(screen.prose(line, 2))
    failures, defined = sum(map(len, alike.values())), len(cells) - left_out
    names = " and ".join(dict.fromkeys(too_large))
    fits = f", {len(too_large)} of them predicted too large for {names} (--gpu names another)" if too_large else ""
    print(f"{defined - failures} of {defined} valid{fits}" + (f", {left_out} left out" if left_out else ""))
    return 1 if failures else 0
