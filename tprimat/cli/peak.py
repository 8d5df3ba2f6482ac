"""The fastest configuration of each machine and model: how fast, how near the limit, what it makes in a day.

./analyze_peak_throughput.py                              results in output, output-* and all_outputs/*
./analyze_peak_throughput.py --show-all --results-dir h100 mi300x
./analyze_peak_throughput.py --nodes 1,2,4,8 --scaling-efficiency 0.9
./analyze_peak_throughput.py --seed-conventions           as the first TPrimat counted, and what is wrong with that
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.common import add_probes
from tprimat.cli.compare import fraction, prices, warmup_steps
from tprimat.cli.console import outlasting
from tprimat.errors import ConfigError, RecordError, UserError

if TYPE_CHECKING:
    from tprimat.analyze.groups import Measured
    from tprimat.analyze.metrics import MetricOptions
    from tprimat.report.peak import PeakAnalysis

MOST_EXPLAINED = 20
"""Peaks that are counted in every way and remarked on; the others stand in the tables."""
SUMMARY_FILE = Path("peak_throughput_summary.txt")


def add_counting(made: argparse.ArgumentParser) -> None:
    """The flags that say which results are read and how they are counted."""
    made.add_argument(
        "--results-dir",
        nargs="+",
        action="append",
        type=Path,
        metavar="PATH",
        help="folders or files with results; several, or repeated (output, output-*, all_outputs/*)",
    )
    made.add_argument("--flops", choices=("causal", "full", "6n"), default="causal", help="how FLOP are counted (causal)")
    made.add_argument("--peak", choices=("dense", "sparse"), default="dense", help="what utilization divides by (dense)")
    made.add_argument("--seed-conventions", action="store_true", help="count as the first TPrimat did, to repeat its figures")
    made.add_argument("--warmup", default="auto", metavar="N", help="steps to leave out, or auto: found in the step times (auto)")
    made.add_argument("--cost-per-gpu-hour", type=float, metavar="PRICE", help="adds a column of cost, in your currency")
    made.add_argument("--config", type=Path, metavar="FILE", help="take prices from its cloud_costs (./config.yaml)")
    add_probes(made, "in the folders of results")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="analyze_peak_throughput.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_counting(made)
    made.add_argument("--show-all", action="store_true", help="show every configuration, not only the peaks")
    made.add_argument("--even-if-different", action="store_true", help="compare machines although their work differs")
    made.add_argument("--nodes", default="1,2,4,8", metavar="LIST", help="node counts to project to (1,2,4,8)")
    made.add_argument("--scaling-efficiency", default="0.9", metavar="SHARE", help="assumed beyond the measured nodes (0.9)")
    made.add_argument("--output", type=Path, default=SUMMARY_FILE, metavar="FILE", help=f"the whole analysis ({SUMMARY_FILE})")
    made.add_argument("--json", action="store_true", help="print the analysis as one JSON document")
    return made


def metric_options(options: argparse.Namespace) -> "MetricOptions":
    """How the command line wants metrics counted.

    Raises:
        ConfigError: --warmup is no number, or --seed-conventions meets a flag that says otherwise.
    """
    from tprimat.analyze.metrics import MetricOptions

    if options.seed_conventions and (options.flops != "causal" or options.peak != "dense"):
        raise ConfigError(
            "--seed-conventions already says how FLOP are counted and which peak they are divided by.",
            where="--flops, --peak",
            fix="leave out --seed-conventions, or the other two",
        )
    skipped = warmup_steps(options.warmup)
    return MetricOptions(
        flops_convention=options.flops,
        warmup="auto" if skipped is None else skipped,
        peak=options.peak,
        cost_per_gpu_hour=options.cost_per_gpu_hour,
        seed_conventions=options.seed_conventions,
    )


def counted_as(options: argparse.Namespace) -> str:
    """The conventions in words."""
    if options.seed_conventions:
        return (
            "Counted as the first TPrimat did: FLOP 6n of rounded sizes; utilization of the sparse peak on NVIDIA, of the dense "
            "one on AMD.\nThese figures do not compare between the two; the other conventions below do."
        )
    return (
        f"FLOP counted {options.flops}, utilization of the {options.peak} peak of the dtype that ran. "
        "[low .. high]: 95 % interval, between runs\nwhere there are several, else between the steps of one run."
    )


def node_counts(text: str) -> list[int]:
    """'1,2,4' -> [1, 2, 4].

    Raises:
        ConfigError: something else than whole numbers from 1.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"{text!r} is not a list of node counts.", where="--nodes", fix="--nodes 1,2,4,8")
    return [int(part) for part in parts]


def share(text: str) -> float:
    """An efficiency: '0.9' or '90%', up to 1.

    Raises:
        ConfigError: neither.
    """
    return 1.0 if text in {"1", "1.0", "100%"} else fraction(text, "--scaling-efficiency", "0.9 or 90%")


def measured_from(options: argparse.Namespace) -> tuple[list["Measured"], int]:
    """The runs that the command line names, and how many files were bad.

    Raises:
        RecordError: there is none.
    """
    from tprimat.cli.results import read_measured, tell_problems, usual_folders

    named = [path for several in options.results_dir or () for path in several]
    paths = named or usual_folders()
    measured, problems = read_measured(paths, metric_options(options), prices(options.config), options.probes)
    tell_problems(problems, len(measured))
    if not measured:
        raise RecordError(
            "No result to analyse.", where=", ".join(map(str, paths)), fix="./benchmark.py writes results to ./output"
        )
    return measured, len(problems)


def analyse(measured: Sequence["Measured"], options: argparse.Namespace) -> "PeakAnalysis":
    """Peaks, projections and what they become by other conventions."""
    from tprimat.analyze import peak
    from tprimat.analyze.groups import group_runs
    from tprimat.report.peak import PeakAnalysis

    nodes, efficiency = node_counts(options.nodes), share(options.scaling_efficiency)
    groups = group_runs(measured)
    entries = peak.ranked_entries(groups)
    best = peak.peaks(entries)
    ranked = {id(made.group) for made in entries}
    warmup = metric_options(options).warmup
    return PeakAnalysis(
        counted_as=counted_as(options),
        flops_words="6n of rounded sizes" if options.seed_conventions else f"{options.flops} FLOP count",
        peak_words="peak (NVIDIA: sparse, AMD: dense)" if options.seed_conventions else f"{options.peak} matrix peak",
        entries=entries,
        peaks=best,
        verdicts=peak.against_the_best(best[:MOST_EXPLAINED], even_if_different=options.even_if_different),
        projections=peak.project(best[0], nodes, efficiency) if best else (),
        efficiency=efficiency,
        by_convention=[(made, peak.by_convention(made, warmup)) for made in best[:MOST_EXPLAINED]],
        notes=peak.remarks(best[:MOST_EXPLAINED]),
        without_rate=[group.label for group in groups if id(group) not in ranked],
        not_counted=[item for item in measured if item.not_counted is not None],
    )


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 when a file was bad or no run counts."""
    from tprimat.records.files import write_atomically
    from tprimat.report.peak import as_document, text

    measured, bad = measured_from(options)
    analysis = analyse(measured, options)
    if options.json:
        print(json.dumps(as_document(analysis), indent=2, allow_nan=False))
    else:
        print(text(analysis, show_all=options.show_all), end="")
    write_atomically(options.output, text(analysis, show_all=True))
    print(f"written: {options.output}", file=sys.stderr)
    return 1 if bad or not analysis.peaks else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 for bad files or nothing that counts, 2 for a mistake in the command line."""
    options = parser().parse_args(argv)
    try:
        return run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(outlasting(main))
