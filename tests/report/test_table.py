"""Verdicts in words, and what a table leaves out."""

import re
from pathlib import Path

import pytest
from changes import groups_of, replace, slowed

from tprimat.analyze.compare import Verdict, rankings
from tprimat.analyze.traits import DifferingTrait
from tprimat.records.discover import load_results
from tprimat.records.schema import Estimate
from tprimat.report import comparison, words
from tprimat.report.comparison import Comparison, rows_of, text
from tprimat.report.tables import Screen, escaped, table
from tprimat.report.words import sentence

RUNS = Path(__file__).parent.parent / "runs"
ENGINE = RUNS.parent.parent / "benchmarks" / "records" / "h200" / "engine"
FASTER = Verdict(
    baseline="A",
    candidate="B",
    outcome="faster",
    ratio=Estimate(value=1.12, low=1.1, high=1.14, samples=6),
    runs=(3, 3),
    assumed_spread=0.004,
)


def test_a_shown_difference_is_said_with_its_interval_and_its_evidence():
    assert sentence(FASTER) == "B against A: 12.0 % faster (ratio 1.120, 95 % interval 1.100 to 1.140; 3 and 3 runs)."


def test_a_refusal_lists_what_differs():
    pairs = {"tokens": ("262,144 tokens a step", "tokens a step unknown"), "clock": ("clock a", "clock b")}
    traits = tuple(DifferingTrait(key, words, "refuse") for key, words in pairs.items())
    verdict = replace(FASTER, outcome="refused", ratio=None, traits=traits)
    assert "they differ: tokens a step unknown against 262,144; clock b against a." in sentence(verdict)


def test_columns_that_nobody_filled_are_left_out_and_one_step_says_n_is_1():
    (result,), _ = load_results([RUNS / "cpu"])
    short = replace(result, steps=result.steps[:2])
    comparison = Comparison(groups=tuple(groups_of(short)), verdicts=())
    header, (row,) = rows_of(comparison)
    assert "MFU" not in header
    assert "energy/token" not in header
    assert row[header.index("tokens/s/process")].endswith("(n = 1)")


def test_a_warning_that_holds_for_many_runs_is_said_once():
    out = text(comparison_of(RUNS / "foreign"))
    assert out.count("framework's own") == 1


def comparison_of(*places):
    results, _ = load_results(list(places))
    groups = groups_of(*results)
    return Comparison(groups=tuple(groups), rankings=tuple(rankings(groups)), verdicts=())


def test_the_winner_comes_first_and_each_workload_is_sorted_by_speed():
    out = text(comparison_of(ENGINE.parent / "repeated")).splitlines()
    assert out[0] == "llama H200 SXM, llama-3.1-8b, 4 GPUs, 131,072 tokens a step, sequence 2,048, bf16"
    assert re.fullmatch(r"dp_mbs4 is fastest: 9\.\d % \[8\.\d, 9\.\d\] ahead of the next, tp2_mbs4", out[1])
    assert out[2].startswith("They differ in strategy, layout, micro-batch (4 | 1), options (overlap_tensor_parallel=False | ")
    assert re.fullmatch(r"Where the throughput went: python3 -m tprimat explain \S+/repeated/dp_mbs4/1/\S+", out[3])
    names = [line.split()[0] for line in out[7:13]]
    assert names == ["dp_mbs4", "tp2_mbs4", "dp_mbs1", "tp2_pp2_mbs4", "tp2_pp2_vpp2_mbs4", "tp4_mbs4"]
    assert "fastest" in out[7]
    assert "-8.2 %" in out[8]
    assert sum("utliers" in line for line in out) == 1


def ranking_of(result, **factors):
    """Of one run under several strategies, each slower by a factor."""
    (ranking,) = rankings(groups_of(*(slowed(result, by, strategy=name, run_id=name) for name, by in factors.items())))
    return ranking


def test_a_difference_between_single_steps_is_not_called_noise():
    (result,), _ = load_results([RUNS / "h100" / "runs" / "h100-llama-0"])
    ranking = ranking_of(replace(result, steps=result.steps[:2]), a=1.0, b=1.2)
    assert words.headline(ranking) == ["a leads b by 20.0 %; single steps have no interval"]
    assert comparison.cells(ranking, [])[1][0][0] == "-16.7 % (n = 1)"


def test_an_interval_of_two_uneven_steps_is_not_printed():
    """Student's t with one degree of freedom makes them reach from a fraction to many times the rate."""
    (result,), _ = load_results([RUNS / "h100" / "runs" / "h100-llama-0"])
    ranking = ranking_of(replace(result, steps=result.steps[:3]), a=1.0, b=1.01)
    verdict = ranking.lead
    assert verdict.ratio.high > 20 * verdict.ratio.low > 0, "the document keeps its ends"
    too_few = "too few steps or runs for an interval"
    assert words.headline(ranking) == [f"No winner: a leads, and b is within noise (1.0 %, {too_few})"]
    assert sentence(verdict).startswith(f"{verdict.candidate} against {verdict.baseline}: no difference shown (ratio ")
    assert f", {too_few}; one run each" in sentence(verdict)
    header, rows = rows_of(Comparison(groups=ranking.groups, verdicts=()))
    assert [row[header.index("tokens/s/GPU")].split(" ", 1)[1] for row in rows] == ["(n = 2)", "(n = 2)"]


def test_large_numbers_of_a_lead_have_thousands_separators():
    assert words.gain(Estimate(value=1500.0, low=1200.0, high=2100.0, samples=6)) == "1,500.00 times [1,200.00, 2,100.00]"
    assert words.gain(Estimate(value=1.9, low=1.2, high=12.5, samples=6)) == "90.0 % [20.0, 1,150.0]"


def test_what_is_within_noise_is_named_and_no_winner_is_claimed():
    (result,), _ = load_results([RUNS / "h100" / "runs" / "h100-llama-0"])
    ranking = ranking_of(result, a=1.0, b=1.00001, c=1.00002, d=1.2)
    (line,) = words.headline(ranking)
    assert re.fullmatch(r"No winner: a leads, and b is within noise \(0\.0 % \[-\d\.\d, \d\.\d\]\); 1 more within noise", line)
    assert [row[0][0] for row in comparison.cells(ranking, [])] == ["first", "0.0 %, noise", "0.0 %, noise", "-16.7 %"]


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_a_comparison_fits_the_terminal_and_breaks_no_number(width):
    comparison = comparison_of(ENGINE, ENGINE.parent / "repeated")
    plain, fitted = text(comparison), text(comparison, Screen(width=width))
    wide = [line for line in fitted.splitlines() if len(line) > width]
    assert all(" " not in line.strip().rstrip(",") for line in wide), wide  # a path stays whole, so that it can be copied
    assert "11,436 [11,112, 11,769]" in plain
    assert "11,436 [11,112, 11,769]" in fitted
    assert ("not shown here: " in fitted) == (width < 160)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a|b", r"a\|b"),
        ("a\\|b", r"a\\\|b"),
        ("[click](https://evil.example)", r"[click\](https:\//evil.example)"),
        ("![x](y)", r"![x\](y)"),
        ("see www.evil.example", r"see www\.evil.example"),
        ("<img src=x onerror=y>", r"\<img src=x onerror=y>"),
        ("two\nlines", "two lines"),
        ("12.1 [11.9, 12.3]", "12.1 [11.9, 12.3]"),
        ("x < 3 / 4", "x < 3 / 4"),
    ],
)
def test_text_from_files_ends_no_cell_and_becomes_no_link(text, written):
    assert escaped(text) == written
    page = table(("name", "n"), [(text, "1")])
    assert len(page.splitlines()) == 3
