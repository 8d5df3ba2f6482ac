"""Run what comes nearest to a published row on this machine, and say whether it is as fast as expected."""

import argparse
import shlex
import sys
from pathlib import Path

from tprimat.cli.common import doing, read
from tprimat.config.options import assignment


def run(options: argparse.Namespace) -> int:
    """Exit status: 0 within the interval, 1 a failed run, 2 no reproduction possible, 3 outside the interval."""
    from tprimat.cli.main import start
    from tprimat.cli.results import explain_newest
    from tprimat.report.explain import against_lines, text
    from tprimat.report.tables import screen_of
    from tprimat.runner.reproduce import nearest_run, refuse_unlike

    place, screen = options.made, screen_of(sys.stdout)
    if place is None:
        pairs = [assignment(text, "gpus=4") for text in options.settings]
        asked = {name if "." in name else name.replace("-", "_"): value for name, value in pairs}
        with doing("choosing the run ..."):
            command, plan, expected = nearest_run(options.row, asked)
        print(f"nearest run: ./benchmark.py {shlex.join(command)}")
        print("\n".join(against_lines(expected, screen) if expected else []))
        more = [*["--dry-run"] * options.dry_run, *(["--gpu", asked["gpu"]] if "gpu" in asked else [])]
        if (status := start("run", "tprimat reproduce", [*command, *more])) or options.dry_run:
            return status
        if expected is None:
            print(f"\nA tiny version of {options.row} trains here; a CPU says nothing of its speed.")
            return 0
        place = max((Path(plan.output_directory) / "runs").iterdir())
    explanation = explain_newest(read(argparse.Namespace(settings=()), [place]), place, options.row)
    refuse_unlike(options.row, explanation.measured.result.run)
    print(text(explanation, "tflops", screen))
    assert explanation.against is not None
    within = explanation.against.within
    words = "no interval: nothing predicts this run, or the row" if within is None else "within" if within else "outside"
    print(f"measured: {explanation.against.here / 1e12:,.0f} TFLOP/s/GPU, {words}")
    return 2 if within is None else 0 if within else 3
