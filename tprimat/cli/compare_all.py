"""Compare each of the folders output-00 to output-99 that a sweep left here, then list all configurations.

./compare_all_configs.sh
./compare_all_configs.sh ./all_outputs
python3 -m tprimat.cli.compare_all ./all_outputs
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tprimat import units
from tprimat.cli import compare
from tprimat.cli.console import outlasting
from tprimat.errors import RecordError, UserError

FOLDERS = "output-[0-9][0-9]"
HEADER = ("folder", "model", "strategy", "layout", "micro", "global", "sequence", "dtype", "machine", "outcome", "tokens/s/GPU")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="compare_all_configs.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("output_dir", nargs="?", type=Path, default=Path("all_outputs"), help="where pictures go (./all_outputs)")
    return made


def summary(folders: Sequence[Path]) -> str:
    """Every run of every folder with what it ran, read from its record."""
    from tprimat.analyze.groups import layout, machine_name
    from tprimat.report.tables import columns

    options = compare.parser().parse_args([])
    rows = []
    for folder in folders:
        for item in compare.measured_runs(options, [folder])[0]:
            run, metrics = item.result.run, item.metrics
            rate = metrics.tokens_per_second_per_gpu.value if metrics and metrics.tokens_per_second_per_gpu else None
            sizes = (run.micro_batch_sequences, run.global_batch_sequences, run.sequence_tokens)
            words = (run.strategy or units.ABSENT, layout(run) or units.ABSENT, *map(units.count, sizes))
            speed = units.ABSENT if rate is None else units.significant(rate)
            rows.append((folder.name, run.model, *words, run.matmul_dtype or units.ABSENT, machine_name(run), run.outcome, speed))
    return columns(HEADER, rows, left=4)


def run(output: Path) -> int:
    """Exit status: 1 when any folder's comparison failed."""
    folders = sorted(path for path in Path().glob(FOLDERS) if path.is_dir())
    if not folders:
        raise RecordError(
            f"There is no {FOLDERS} here.", where=str(Path().resolve()), fix="./run_all_configs.sh writes output-00 to output-04"
        )
    failed = pictures(folders, output)
    print(f"configurations\n{summary(folders)}")
    return failed


def pictures(folders: Sequence[Path], output: Path, probes: Sequence[Path] = ()) -> int:
    """One comparison a folder. 1 when any of them failed."""
    worst = 0
    flags = [word for place in probes for word in ("--probes", str(place))]
    for folder in folders:
        picture = output / f"compare-{folder.name.removeprefix('output-')}.png"
        print(f"{folder}", flush=True)
        worst = max(worst, compare.main(["--results-dir", str(folder), "--output", str(picture), *flags]))
        print()
    return min(worst, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 for a folder that failed, 2 for nothing to compare."""
    options = parser().parse_args(argv)
    try:
        return run(options.output_dir)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(outlasting(main))
