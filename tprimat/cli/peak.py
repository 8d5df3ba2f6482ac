"""Find the fastest configuration of each machine and model: how fast, how near the limit, how many tokens per day."""

import argparse
import sys
from pathlib import Path

from tprimat.cli.common import fraction, metric_options, print_json, read, results_dirs
from tprimat.core.errors import RecordError

SUMMARY_FILE = Path("peak_throughput_summary.txt")
PICTURE = Path("peak_throughput_analysis.png")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 when a file was bad or no run counts."""
    from tprimat.analyze.peak import analyze_peaks
    from tprimat.records.store import write_atomically
    from tprimat.report.peak import as_document, text
    from tprimat.report.tables import screen_of
    from tprimat.report.words import not_counted_words

    efficiency = fraction(options.scaling_efficiency, "--scaling-efficiency", "0.9 or 90%")
    metrics = metric_options(options)
    results = read(options, results_dirs(options), metrics)
    analysis = analyze_peaks(
        results.measured,
        metrics,
        nodes=options.nodes,
        efficiency=efficiency,
        even_if_different=options.even_if_different,
    )
    if options.picture and not analysis.peaks:
        causes = "\n".join(dict.fromkeys(map(not_counted_words, analysis.not_counted)))
        what = "No run counts, so there is nothing to draw."
        raise RecordError(what, why=causes, fix="./analyze_peak_throughput.py names them")
    if options.picture:
        from tprimat.report.plots import draw_sheet
        from tprimat.report.plots.peak import peak_sheet

        draw_sheet(peak_sheet(analysis), path := options.output or PICTURE)
        print(f"written: {path}", file=sys.stderr)
        return 1 if results.problems else 0
    if options.json:
        print_json(as_document(analysis))
    else:
        print(text(analysis, show_all=options.show_all, screen=screen_of(sys.stdout)), end="")
    write_atomically(options.output or SUMMARY_FILE, text(analysis, show_all=True))
    print(f"written: {options.output or SUMMARY_FILE}", file=sys.stderr)
    return 1 if results.problems or not analysis.peaks else 0
