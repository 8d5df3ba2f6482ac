"""Compare within each of the folders output-00 to output-99 of a sweep, then list all configurations.

./compare_all_configs.sh
./compare_all_configs.sh ./all_outputs
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tprimat.core import units
from tprimat.core.errors import RecordError
from tprimat.report.screen import PLAIN, Screen, screen_of

FOLDERS = "output-[0-9][0-9]"
HEADER = ("folder", "model", "strategy", "layout", "MBS", "sequences", "dtype", "machine", "outcome", "tokens/s/GPU")

DROP = ("sequences", "MBS", "dtype", "layout", "outcome", "machine")
"""Columns in the order in which a narrow terminal loses them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("output_dir", nargs="?", type=Path, default=Path("all_outputs"), help="where pictures go (./all_outputs)")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 when the comparison of a folder failed."""
    folders = sorted(path for path in Path().glob(FOLDERS) if path.is_dir())
    if not folders:
        raise RecordError(
            "No results here: expected folders output-00 to output-04.",
            where=str(Path().resolve()),
            fix="./run_all_configs.sh writes them",
        )
    failed = draw_folders(folders, options.output_dir)
    print(f"configurations\n{summary(folders, screen_of(sys.stdout))}")
    return failed


def draw_folders(folders: Sequence[Path], output: Path, probes: Sequence[Path] = ()) -> int:
    """Compare within each folder and draw its picture. Return 1 when any of them failed."""
    from tprimat.cli.main import start

    flags = [word for place in probes for word in ("--probes", str(place))]
    worst = 0
    for folder in folders:
        picture = output / f"compare-{folder.name.removeprefix('output-')}.png"
        print(f"{folder}", flush=True)
        words = ["--results-dir", str(folder), "--output", str(picture), *flags]
        worst = max(worst, start("compare", "compare.py", words))
        print()
    return min(worst, 1)


def summary(folders: Sequence[Path], screen: Screen = PLAIN) -> str:
    """List every run of every folder with what it ran, as its record says."""
    from tprimat.analyze.metrics import MetricOptions
    from tprimat.analyze.traits import dtype_that_ran, layout, machine_name
    from tprimat.report.catalogue import per_rank
    from tprimat.report.tables import columns
    from tprimat.runner.analysis import read_results

    rows, platforms = [], set()
    for folder in folders:
        for item in read_results([folder], MetricOptions(), {}).measured:
            run, metrics = item.result.run, item.metrics
            platforms.add(run.machine.platform)
            rate = metrics.tokens_per_second_per_gpu.value if metrics and metrics.tokens_per_second_per_gpu else None
            batch = f"{units.count(run.global_batch_sequences)} x {units.count(run.sequence_tokens)}"
            sizes = (units.count(run.micro_batch_sequences), batch)
            words = (run.strategy or units.ABSENT, layout(run) or units.ABSENT, *sizes)
            speed = units.ABSENT if rate is None else units.significant(rate)
            rows.append(
                (folder.name, run.model, *words, dtype_that_ran(run) or units.ABSENT, machine_name(run), run.outcome, speed)
            )
    return columns([per_rank(heading, platforms) for heading in HEADER], rows, left=4, screen=screen, drop=DROP)
