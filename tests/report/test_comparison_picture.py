"""The six panels of a comparison, as they lie on the picture."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from runs.make_runs import a_run, steps_of, write_run

from tprimat.analyze.groups import group_runs, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.records.discover import load_results
from tprimat.report.plots import comparison

RUNS = Path(__file__).parents[1] / "runs"
LONG = "a_strategy whose label takes up two thirds of the width of the picture if it is written into one line beside the bars"


@pytest.mark.parametrize("machine", ["h100", "cpu"])
@pytest.mark.parametrize("strategies", [("a", "b", "c"), (LONG, f"{LONG}_2", f"{LONG}_3")])
def test_nothing_is_cut_or_covered_however_long_the_labels_are(machine, strategies, monkeypatch, tmp_path):
    (first, *_) = load_results([RUNS / machine])[0]
    runs = [dataclasses.replace(first, run=dataclasses.replace(first.run, strategy=name)) for name in strategies]
    drawn = []
    monkeypatch.setattr(comparison, "save", lambda made, path: (made.savefig(path), drawn.append(made)))
    comparison.draw_comparison(group_runs([measure(run, MetricOptions()) for run in runs]), "title", tmp_path / "compare.png")
    (picture,) = drawn
    speed, memory = (axes.get_title(loc="left") for axes in picture.subfigs[0].axes)
    assert speed.splitlines()[0].startswith(("Model throughput", "Throughput per rank"))
    assert memory == "Peak memory, worst rank"
    titles = [axes._left_title.get_window_extent() for axes in picture.subfigs[0].axes]
    assert titles[0].x1 < titles[1].x0
    (legend,) = (legend for part in picture.subfigs for legend in part.legends)
    extent = legend.get_window_extent()
    assert picture.bbox.x0 <= extent.x0
    assert extent.x1 <= picture.bbox.x1
    steps = [axes for part in picture.subfigs for axes in part.axes if axes.get_xlabel() == "optimizer step"]
    assert all(float(tick).is_integer() for axes in steps for tick in axes.get_xticks())


@pytest.mark.parametrize(
    "seconds", [(1.8, 1.1, 1.2), (1.9, 1.02, 1.02), (1.01, 1.02, 1.01), (4.9, 1.01, 1.0), (9.9, 2.01, 2.0), (60.0, 2.0, 2.1)]
)
def test_the_axis_of_step_times_has_two_numbers_at_least(seconds, monkeypatch, tmp_path):
    run = a_run("near")
    write_run(tmp_path, run, steps_of(run, np.array(seconds), 7))
    drawn = []
    monkeypatch.setattr(comparison, "save", lambda made, path: (made.savefig(path), drawn.append(made)))
    comparison.draw_comparison(
        group_runs([measure(found, MetricOptions()) for found in load_results([tmp_path])[0]]), "title", tmp_path / "compare.png"
    )
    (axes,) = (axes for part in drawn[0].subfigs for axes in part.axes if axes.get_title(loc="left").startswith("Step time"))
    low, high = axes.get_ylim()
    shown = [text.get_text() for text in axes.get_yticklabels() if low <= text.get_position()[1] <= high and text.get_text()]
    assert len(shown) >= 2
    assert ("log scale" in axes.get_ylabel()) == (axes.get_yscale() == "log") == (max(seconds) >= 5 * min(seconds))
