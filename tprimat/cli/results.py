"""The commands that show results in another way: what more GPUs gain, one page, where the throughput went."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tprimat.cli.common import doing, print_json, read
from tprimat.core.errors import UserError

if TYPE_CHECKING:
    from tprimat.report.explain import Explanation
    from tprimat.runner.analysis import Results

THROUGHPUT_PICTURE = "img_throughput.png"
MULTIPLIER_PICTURE = "img_multiplier.png"


def scaling(options: argparse.Namespace) -> int:
    """Exit status: 0, or 1 when a file was bad."""
    from tprimat.report import scaling
    from tprimat.report.plots import draw_sheet
    from tprimat.report.plots.scaling import MULTIPLIER, THROUGHPUT, scaling_sheet
    from tprimat.report.tables import screen_of
    from tprimat.runner.analysis import scaling_of

    results = read(options, options.results)
    scaled = scaling_of(results.measured)
    for curves, name in ((THROUGHPUT, THROUGHPUT_PICTURE), (MULTIPLIER, MULTIPLIER_PICTURE)):
        draw_sheet(scaling_sheet(scaled, curves), options.output / name)
    if options.format == "json":
        print_json(scaling.as_document(scaled))
    else:
        print(scaling.text(scaled, screen_of(sys.stdout)), end="")
    print(f"written: {options.output / THROUGHPUT_PICTURE}, {options.output / MULTIPLIER_PICTURE}", file=sys.stderr)
    return 1 if results.problems else 0


def report(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 when a file was bad."""
    from tprimat.records.store import write_atomically
    from tprimat.runner.analysis import report_page

    results = read(options, options.results, to_share=True)
    write_atomically(options.output, report_page(results))
    print(f"written: {options.output}", file=sys.stderr)
    return 1 if results.problems else 0


def explain(options: argparse.Namespace) -> int:
    """Exit status: 0."""
    from tprimat.records.store import write_atomically
    from tprimat.report.explain import document, svg, text
    from tprimat.report.tables import screen_of

    explanation = explain_newest(read(options, [options.run]), options.run, options.against)
    if options.picture:
        write_atomically(options.picture, svg(explanation, options.unit))
        print(f"written: {options.picture}", file=sys.stderr)
    if options.json:
        print_json(document(explanation))
    else:
        print(text(explanation, options.unit, screen_of(sys.stdout)))
    return 0


def explain_newest(results: "Results", place: Path, other: str | None) -> "Explanation":
    """Explain the newest run of a place, beside another run or a published row if one is named."""
    from tprimat.runner.against import against
    from tprimat.runner.explain import explained, newest, trace_of_run

    measured = newest(results.measured, place)
    if len(results.measured) > 1:
        print(f"the newest of {len(results.measured)} runs: {measured.result.path}", file=sys.stderr)
    trace = None
    try:
        with doing("reading the trace of the run ..."):
            trace = trace_of_run(measured.result.run, measured.result.path)
    except UserError as error:
        print(f"warning: explained without the trace: {error}", file=sys.stderr)
    explanation = explained(measured, results.probes, trace)
    return replace(explanation, against=against(explanation, other, results.probes)) if other else explanation
