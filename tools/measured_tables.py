#!/usr/bin/env python3
"""Write the tables of benchmarks/results/measured.md and moe.md from the records; with --check, only compare.

python3 tools/measured_tables.py
python3 tools/measured_tables.py --check

A block ends with <!-- end --> and begins with one of

<!-- table ARGUMENTS -->     which follow ./compare.py --results-dir: folders, and --probes with a place of probes
<!-- profile ARGUMENTS -->   which are summaries of traces
<!-- power ARGUMENTS -->     which follow ./compare.py --results-dir: mean power of each configuration
<!-- published ARGUMENTS --> likewise: the published results nearest to the fastest configuration
<!-- collectives ARGUMENTS --> which are folders of probes of one accelerator: times, and the errors of predictions without probes
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from page import page_parser, replace_blocks, update_page  # noqa: E402
from profile_figures import markdown as profile_table  # noqa: E402
from profile_figures import read_summary  # noqa: E402

from tprimat.analyze.metrics import MetricOptions  # noqa: E402
from tprimat.analyze.probes import median_seconds, newest_of_each  # noqa: E402
from tprimat.analyze.published import Neighbor, nearest_published  # noqa: E402
from tprimat.core import units  # noqa: E402
from tprimat.core.accelerators import find_accelerator  # noqa: E402
from tprimat.core.statistics import FEWEST_RUNS  # noqa: E402
from tprimat.predict.rates import BUS_KINDS, published_rates  # noqa: E402
from tprimat.records.discover import PROBES_FILE  # noqa: E402
from tprimat.records.store import read_probes  # noqa: E402
from tprimat.report.catalogue import tera  # noqa: E402
from tprimat.report.comparison import Comparison, as_json, markdown  # noqa: E402
from tprimat.report.tables import table as markdown_table  # noqa: E402
from tprimat.runner.analysis import compare_runs, read_results  # noqa: E402

PAGES = ("measured.md", "moe.md")


def table(arguments: str) -> str:
    """Return compare.py's table of some folders, without the verdicts that follow it."""
    return without_lone_intervals(markdown(compared(arguments)).split("\n\n")[0]) + "\n"


def theirs(neighbor: Neighbor) -> str:
    """Say what a published result has where it differs from ours."""
    stated = [f"{one.name} {plain(one.theirs)}" for one in neighbor.differences if one.theirs is not None]
    silent = [one.name for one in neighbor.differences if one.theirs is None]
    unknown = [f"not stated: {', '.join(silent)}"] if silent else []
    return "; ".join([*([", ".join(stated)] if stated else []), *unknown]) or "nothing that the source states"


def plain(value: object) -> str:
    """Write a number with separators of thousands."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def compared(arguments: str) -> Comparison:
    """Compare some folders as compare.py does with these arguments; a process for each table would import everything again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+", type=lambda name: ROOT / name)
    parser.add_argument("--probes", action="append", default=[], type=lambda name: ROOT / name)
    given = parser.parse_args(arguments.split())
    results = read_results(given.folders, MetricOptions(), {}, given.probes)
    if results.problems:
        raise results.problems[0]
    return compare_runs(results.measured, given.folders, None)


INTERVAL = re.compile(r" \[[^\]|]*\]")


def without_lone_intervals(markdown: str) -> str:
    """Drop the intervals of rows with fewer than FEWEST_RUNS runs: a reader would take them for those of the next run."""
    lines = markdown.splitlines()
    place = [cell.strip() for cell in lines[0].split("|")].index("runs")
    rows = [line if int(line.split("|")[place]) >= FEWEST_RUNS else INTERVAL.sub("", line) for line in lines[2:]]
    return "\n".join([*lines[:2], *rows])


def profile(arguments: str) -> str:
    """Return the table of what steps spend their time on."""
    paths = [ROOT / path for path in arguments.split()]
    return profile_table({path.stem: read_summary(path) for path in paths}) + "\n"


def power(arguments: str) -> str:
    """Return the mean power of a GPU over the steady steps of each configuration: joules of a token by tokens a second."""
    groups = json.loads(as_json(compared(arguments)))["groups"]
    rows = []
    for group in groups:
        metrics = [run["metrics"] for run in group["runs"] if run["metrics"]["joules_per_token"] is not None]
        watts = [each["joules_per_token"] * each["tokens_per_second_per_gpu"]["value"] for each in metrics]
        if watts:
            rows.append([group["label"], str(len(watts)), f"{statistics.mean(watts):.0f} W"])
    return markdown_table(["configuration", "runs", "mean power per GPU"], rows, left=1) + "\n"


def published(arguments: str) -> str:
    """Return the published results that are most like ours, by model FLOP/s on a common basis, and what differs there."""
    rows = []
    for nearest in nearest_published(compared(arguments).groups):
        ours = nearest.ours
        flops, share = ours.flops_per_gpu, ours.utilization
        own = [tera(flops.value if flops else None), units.percent(share.value if share else None)]
        rows.append([ours.group.label, units.ABSENT, *own, units.ABSENT, units.ABSENT])
        for one in nearest.neighbors:
            rate = [tera(one.rebased.flops_per_second_per_gpu), units.percent(one.rebased.mfu)]
            there = "; ".join(filter(None, (theirs(one), one.result.notes)))
            rows.append([one.result.name, one.result.date or units.ABSENT, *rate, f"{one.ratio:.2f} x", there])
    return markdown_table(["result", "when", "TFLOP/s/GPU", "of dense peak", "ours is", "there"], rows, left=2) + "\n"


def collectives(arguments: str) -> str:
    """Return the median time of each collective, and the error of what is predicted for this accelerator without its probes."""
    probes = [probe for name in arguments.split() for probe in newest_of_each(read_probes(ROOT / name / PROBES_FILE))]
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for probe in sorted(probes, key=lambda probe: probe.shape.get("message_bytes", 0)):
        accelerator, time = find_accelerator(probe.machine.accelerator), median_seconds(probe)
        if probe.kind in BUS_KINDS and accelerator is not None and time is not None:
            size, ranks = probe.shape["message_bytes"], probe.shape["ranks"]
            error = published_rates(accelerator, ranks).exchange_seconds(probe.kind, size, ranks) / time.value - 1
            rows.setdefault((probe.kind, ranks), {})[units.message_size(size)] = (
                f"{units.seconds(time.value)}, {units.signed_percent(error, 0)}"
            )
    sizes = list(dict.fromkeys(size for row in rows.values() for size in row))
    order = sorted(rows, key=lambda place: (place[1], BUS_KINDS.index(place[0])))
    cells = [[kind, str(ranks), *(rows[kind, ranks].get(size, units.ABSENT) for size in sizes)] for kind, ranks in order]
    return markdown_table(["operation", "ranks", *sizes], cells, left=1) + "\n"


def main() -> int:
    """Exit status: 0, or 1 where --check finds a difference."""
    options = page_parser(__doc__).parse_args()
    status = 0
    for name in PAGES:
        page = ROOT / "benchmarks" / "results" / name
        text = replace_blocks(page.read_text(encoding="utf8"), "table", table)
        for kind, make in {"profile": profile, "power": power, "published": published, "collectives": collectives}.items():
            text = replace_blocks(text, kind, make)
        status |= update_page(page, text, check=options.check, command="python3 tools/measured_tables.py")
    return status


if __name__ == "__main__":
    sys.exit(main())
