"""Say where the throughput of a run went: a waterfall from the GPU's dense peak to what was measured, and what would help.

tprimat explain output                              the newest run in a folder of results
tprimat explain output/runs/RUN --in ms             in milliseconds of a step
tprimat explain output --against published          what differs from the nearest published row, and what it is worth
tprimat explain output --picture waterfall.svg      also as a picture

Parts come from the trace of a run with the profiler (--set profiling.enabled=true), else from telemetry, the times of the ranks,
and a prediction by probes of the machine or published rates. Together they are the step.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from tprimat.cli.common import add_counting, print_json, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or folder, file or archive with results")
    parser.add_argument("--in", choices=("tflops", "ms"), default="tflops", dest="unit", help="TFLOP/s per GPU, or ms of a step")
    parser.add_argument("--against", metavar="OTHER", help="another run, a published row, or published: the nearest")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw it as well, for light and dark pages")
    parser.add_argument("--json", action="store_true", help="print all numbers as one JSON document")
    add_counting(parser)


def run(options: argparse.Namespace) -> int:
    """Exit status: 0."""
    from tprimat.records.store import write_atomically
    from tprimat.report.explain import document, text
    from tprimat.report.plots.waterfall import svg
    from tprimat.report.tables import screen_of
    from tprimat.runner.against import against
    from tprimat.runner.explain import explained, newest, trace_of_run

    results = read(options, [options.run])
    measured = newest(results.measured, options.run)
    trace = trace_of_run(measured.result.run, measured.result.path)
    found = explained(measured, results.probes, trace)
    if options.against:
        found = replace(found, against=against(found, options.against, results.probes))
    if options.picture:
        write_atomically(options.picture, svg(found, options.unit))
        print(f"written: {options.picture}", file=sys.stderr)
    if options.json:
        print_json(document(found))
    else:
        print(text(found, options.unit, screen_of(sys.stdout)))
    return 0
