"""Compare training runs: which is faster, by how much, how sure."""

import argparse
import sys
from pathlib import Path

from tprimat.cli.common import fraction, read, results_dirs, varying_traits
from tprimat.core.errors import ConfigError

FORMATS = ("png", "svg", "pdf", "md", "json")


def run(options: argparse.Namespace) -> int:
    """Exit status: 0; 1 when a file was bad or no run counts. Of a gate: 0 open, 1 shown slower, 3 neither is shown."""
    from tprimat.analyze.compare import Question
    from tprimat.core.units import percent
    from tprimat.records.store import write_atomically
    from tprimat.report import comparison as tables
    from tprimat.report.tables import screen_of
    from tprimat.runner.analysis import compare_runs, regression_gate

    path: Path = options.output
    if path.suffix.lstrip(".").lower() not in FORMATS:
        raise ConfigError(f"{path} has no known suffix.", where="--output", fix=f"end it in one of {', '.join(FORMATS)}")
    margin = None if options.fail_if_slower is None else fraction(options.fail_if_slower, "--fail-if-slower")
    paths = results_dirs(options) or [Path("output")]
    baseline = options.baseline
    if margin is not None and baseline is None:
        if len(paths) < 2:
            raise ConfigError("A gate needs a baseline.", where="--fail-if-slower", fix="--baseline DIR, one of --results-dir")
        baseline = str(paths[0])
    question = Question(varying=varying_traits(options.varying), even_if_different=options.even_if_different)
    results = read(options, paths)
    comparison = compare_runs(results.measured, paths, baseline, question)
    screen = screen_of(sys.stdout)
    print(tables.text(comparison, screen), end="")
    if options.published:
        from tprimat.analyze.published import nearest_published

        print("\n" + tables.published_text(nearest_published(comparison.groups), screen), end="")
    if comparison.groups:
        writers = {".md": tables.markdown, ".json": tables.as_json}
        if (suffix := path.suffix.lower()) in writers:
            write_atomically(path, writers[suffix](comparison))
        else:
            from tprimat.report.plots import draw_sheet
            from tprimat.report.plots.comparison import comparison_sheet

            draw_sheet(comparison_sheet(comparison), path)
        print(f"written: {path}", file=sys.stderr)
    if margin is None:
        return 1 if results.problems or not comparison.groups else 0
    closed, undecided = regression_gate(comparison, margin)
    undecided += ["a result was skipped."] * bool(results.problems)
    judged = {name for one in comparison.verdicts for name in (one.baseline, one.candidate)}
    alone = ", ".join(group.label for group in comparison.groups if group.label not in judged)
    passed = f"passed: nothing is slower than its baseline by more than {percent(margin)}."
    passed += f" Not compared: {alone}." if alone else ""
    for line in [*(f"failed: {one}" for one in closed), *(f"undecided: {one}" for one in undecided)] or [passed]:
        print(screen_of(sys.stderr).prose(f"gate: {line}", 2), file=sys.stderr)
    return 1 if closed else 3 if undecided else 0
