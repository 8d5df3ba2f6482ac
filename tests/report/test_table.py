"""Verdicts in words, and what a table leaves out."""

import dataclasses
import re
from pathlib import Path

from tprimat.analyze.compare import Difference, Verdict
from tprimat.analyze.groups import group_runs, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.records.discover import load_results
from tprimat.records.schema import Estimate
from tprimat.report.comparison import Comparison, rows_of, sentence, text

RUNS = Path(__file__).parent.parent / "runs"
FASTER = Verdict(
    baseline="A",
    candidate="B",
    outcome="faster",
    ratio=Estimate(value=1.12, low=1.1, high=1.14, samples=6),
    differences=(),
    evidence="3 and 3 runs",
)


def test_a_shown_difference_is_said_with_its_interval_and_its_evidence():
    assert sentence(FASTER) == "B against A: 12.0 % faster (ratio 1.120, 95 % interval 1.100 to 1.140; 3 and 3 runs)."


def test_twice_the_speed_and_more_is_said_as_a_multiple():
    verdict = dataclasses.replace(FASTER, ratio=Estimate(value=12.459, low=7.4, high=21.0, samples=2))
    assert sentence(verdict).startswith("B against A: 12.5 times as fast (ratio 12.459, ")


def test_no_difference_shown_names_no_winner():
    verdict = dataclasses.replace(
        FASTER, outcome="no difference shown", ratio=Estimate(value=1.01, low=0.99, high=1.03, samples=2)
    )
    assert sentence(verdict).startswith("B against A: no difference shown (ratio 1.010")
    assert "faster" not in sentence(verdict)


def test_a_refusal_lists_what_differs():
    entries = (Difference(what="tokens a step", first=262144, second=None), Difference(what="clock", first="a", second="b"))
    verdict = dataclasses.replace(FASTER, outcome="refused", ratio=None, differences=entries)
    assert "they differ: tokens a step 262,144 and not recorded; clock a and b." in sentence(verdict)


def test_columns_that_nobody_filled_are_left_out_and_one_step_says_n_is_1():
    (result,), _ = load_results([RUNS / "cpu"])
    short = dataclasses.replace(result, steps=result.steps[:2])
    comparison = Comparison(groups=tuple(group_runs([measure(short, MetricOptions())])), verdicts=())
    header, (row,) = rows_of(comparison)
    assert "MFU" not in header
    assert "energy/token" not in header
    assert row[header.index("tokens/s/GPU")].endswith("(n = 1)")


def test_a_warning_that_holds_for_many_runs_is_said_once():
    results, _ = load_results([RUNS / "foreign"])
    out = text(Comparison(groups=tuple(group_runs([measure(result, MetricOptions()) for result in results])), verdicts=()))
    assert out.count("framework's own") == 1


def test_the_spread_between_repetitions_is_said_where_there_are_several():
    results, _ = load_results([RUNS / "h100"])
    out = text(Comparison(groups=tuple(group_runs([measure(result, MetricOptions()) for result in results])), verdicts=()))
    (line,) = (line for line in out.splitlines() if line.startswith("Runs of "))
    assert re.fullmatch(
        r"Runs of llama H100 SXM minimal_communication differ by 0\.\d\d % \(standard deviation, 3 runs\)\.", line
    )
