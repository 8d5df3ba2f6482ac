"""Compare training runs: which is faster, by how much, how sure.

./compare.py                                             all results in ./output
./compare.py --results-dir h100 --results-dir mi300x     two folders side by side
./compare.py --results-dir before after --baseline before --fail-if-slower 3%
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.common import add_probes
from tprimat.cli.console import outlasting
from tprimat.errors import ConfigError, RecordError, UserError

if TYPE_CHECKING:
    from tprimat.analyze.groups import Measured, Origin
    from tprimat.records.benchmark_file import RunResult
    from tprimat.report.comparison import Comparison

FORMATS = ("png", "svg", "pdf", "md", "csv", "json")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument(
        "--results-dir",
        nargs="+",
        action="append",
        type=Path,
        metavar="PATH",
        help="folders or files with results; several, or repeated (./output)",
    )
    made.add_argument("--output", type=Path, metavar="FILE", help="where to write (./compare.png, or the format's suffix)")
    made.add_argument("--format", choices=FORMATS, help="of the file (png, or as --output ends)")
    made.add_argument("--baseline", metavar="WORDS", help="compare with this: a folder of results, or words of a label")
    made.add_argument("--even-if-different", action="store_true", help="compare unlike workloads; the title says what differs")
    made.add_argument(
        "--fail-if-slower",
        metavar="3%",
        help="exit 1 if a run is shown slower than the baseline by more than this, or cannot be judged",
    )
    made.add_argument("--published", action="store_true", help="set the nearest published results beside ours")
    made.add_argument("--flops", choices=("causal", "full", "6n"), default="causal", help="how FLOP are counted (causal)")
    made.add_argument("--warmup", default="auto", metavar="N", help="steps to leave out, or auto: found in the step times (auto)")
    made.add_argument("--cost-per-gpu-hour", type=float, metavar="PRICE", help="adds a column of cost, in your currency")
    made.add_argument("--config", type=Path, metavar="FILE", help="take prices from its cloud_costs (./config.yaml)")
    add_probes(made, "in the folders of results")
    return made


@dataclass(frozen=True, slots=True)
class Target:
    """The file to write."""

    path: Path
    kind: str


def target(options: argparse.Namespace) -> Target:
    """Where the comparison goes, in which format.

    Raises:
        ConfigError: the suffix is of no known format, or of another than was asked for.
    """
    kind: str = options.format or "png"
    if options.output is None:
        return Target(Path(f"compare.{kind}"), kind)
    suffix = options.output.suffix.lstrip(".").lower()
    if suffix not in FORMATS:
        raise ConfigError(
            f"{options.output} has no known suffix.", where="--output", fix=f"end it in one of {', '.join(FORMATS)}"
        )
    if options.format not in {None, suffix}:
        raise ConfigError(
            f"{options.output} is not a {options.format} file.", where="--output, --format", fix="leave one of them out"
        )
    return Target(options.output, suffix)


def fraction(text: str, flag: str = "--fail-if-slower", example: str = "3% or 0.03") -> float:
    """'3%' or '0.03' -> 0.03.

    Raises:
        ConfigError: neither.
    """
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ConfigError(f"{text!r} is not a share.", where=flag, fix=example)
    return value


def warmup_steps(text: str) -> int | None:
    """A number of steps, or None for auto.

    Raises:
        ConfigError: neither.
    """
    if text == "auto":
        return None
    if not text.isdigit():
        raise ConfigError(f"{text!r} is not a number of steps.", where="--warmup", fix="a whole number, or auto")
    return int(text)


def prices(config: Path | None) -> dict[str, float]:
    """Prices of a GPU hour by accelerator. A config.yaml that was not asked for and is broken costs the prices only.

    Raises:
        ConfigError: the file that was named is missing or wrong.
    """
    path = config or Path("config.yaml")
    if config is None and not path.is_file():
        return {}
    from tprimat.config.load import load_config

    try:
        return load_config(path).benchmarking.cloud_costs
    except ConfigError as error:
        if config is not None:
            raise
        print(f"no prices: {error}", file=sys.stderr)
        return {}


def measured_runs(options: argparse.Namespace, paths: Sequence[Path]) -> tuple[list["Measured"], list[RecordError]]:
    """All runs under some paths with their metrics, and what could not be read."""
    from tprimat.analyze.metrics import MetricOptions
    from tprimat.cli.results import read_measured

    skipped = warmup_steps(options.warmup)
    choice = MetricOptions(
        flops_convention=options.flops,
        warmup="auto" if skipped is None else skipped,
        cost_per_gpu_hour=options.cost_per_gpu_hour,
    )
    return read_measured(paths, choice, prices(options.config), options.probes)


def results_paths(options: argparse.Namespace) -> list[Path]:
    """Where results are looked for."""
    return [path for several in options.results_dir or [[Path("output")]] for path in several]


def origin_in(paths: Sequence[Path]) -> "Origin":
    """Names a run by the first of some paths that holds it, as the user wrote it."""

    def origin(result: "RunResult") -> str:
        return next((str(path) for path in paths if path in (result.path, *result.path.parents)), str(result.path))

    return origin


def compare(measured: Sequence["Measured"], options: argparse.Namespace) -> "Comparison":
    """Groups and verdicts: everything against the baseline, or against the first configuration that is comparable."""
    from tprimat.analyze import ranking
    from tprimat.analyze.compare import verdict
    from tprimat.analyze.groups import group_runs
    from tprimat.report.comparison import Comparison

    folder = Path(options.baseline) if options.baseline else None
    if folder is not None and folder.exists():
        groups = group_runs(measured, origin_in([folder, *results_paths(options)]))
        baselines = ranking.groups_in(folder, groups)
        if not baselines:
            raise ConfigError(f"No run in {folder} counts.", where="--baseline", fix="name it in --results-dir as well")
        paired = ranking.pairs_with(baselines, groups)
    else:
        groups = group_runs(measured)
        paired = (
            ranking.pairs_with(ranking.groups_named(options.baseline, groups), groups)
            if options.baseline
            else ranking.default_pairs(groups)
        )
    return Comparison(
        groups=tuple(groups),
        verdicts=tuple(verdict(one, other, even_if_different=options.even_if_different) for one, other in paired),
        not_counted=tuple(item for item in measured if item.not_counted is not None),
    )


def title_of(comparison: "Comparison") -> str:
    """Says what is compared, and what differs where it is compared all the same."""
    runs = sum(len(group.runs) for group in comparison.groups)
    differing = sorted({entry.what for verdict in comparison.verdicts for entry in verdict.differences})
    title = f"{len(comparison.groups)} configurations, {runs} runs"
    if len(comparison.groups) == 1:
        title = f"{comparison.groups[0].label}, {runs} run{'s' * (runs > 1)}"
    return title + (f"; NOT LIKE FOR LIKE, they differ in {', '.join(differing)}" if differing else "")


def write(comparison: "Comparison", destination: Target) -> None:
    """The comparison as a file."""
    from tprimat.records.files import write_atomically
    from tprimat.report import comparison as table

    writers = {"md": table.markdown, "csv": table.comma_separated, "json": table.as_json}
    if destination.kind in writers:
        write_atomically(destination.path, writers[destination.kind](comparison))
        return
    from tprimat.report.plots.comparison import draw_comparison

    draw_comparison(comparison.groups, title_of(comparison), destination.path)


def gate(comparison: "Comparison", margin: float) -> list[str]:
    """Why a regression gate must stay closed; empty: it opens."""
    from tprimat.report.comparison import sentence

    if not comparison.verdicts:
        return ["there is nothing to compare: a gate needs a baseline and another configuration that count"]
    return [sentence(found) for found in comparison.verdicts if found.outcome == "refused" or found.slower_than(margin)]


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 when a file was bad, no run counts, or the gate stays closed."""
    from tprimat.cli.results import tell_problems
    from tprimat.report.comparison import text

    destination = target(options)
    margin = None if options.fail_if_slower is None else fraction(options.fail_if_slower)
    paths = results_paths(options)
    measured, problems = measured_runs(options, paths)
    tell_problems(problems, len(measured))
    if not measured:
        raise RecordError(
            "No result to compare.", where=", ".join(map(str, paths)), fix="./benchmark.py writes results to ./output"
        )
    comparison = compare(measured, options)
    print(text(comparison), end="")
    if options.published:
        from tprimat.cli.published import section

        print("\n" + section(comparison.groups), end="")
    if comparison.groups:
        write(comparison, destination)
        print(f"written: {destination.path}", file=sys.stderr)
    closed = [] if margin is None else gate(comparison, margin)
    for reason in closed:
        print(f"gate: {reason}", file=sys.stderr)
    return 1 if problems or closed or not comparison.groups else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 for a failed comparison, 2 for a mistake in the command line."""
    options = parser().parse_args(argv)
    try:
        return run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(outlasting(main))
