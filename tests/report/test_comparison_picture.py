"""The six panels of a comparison, as they lie on the picture."""

import dataclasses
from pathlib import Path

import pytest

from tprimat.analyze.groups import group_runs, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.record.collect import load_results
from tprimat.report import plot

RUNS = Path(__file__).parents[1] / "runs"
LONG = "a_strategy whose label takes up two thirds of the width of the picture if it is written into one line beside the bars"


@pytest.mark.parametrize("machine", ["h100", "cpu"])
@pytest.mark.parametrize("strategies", [("a", "b", "c"), (LONG, f"{LONG}_2", f"{LONG}_3")])
def test_nothing_is_cut_or_covered_however_long_the_labels_are(machine, strategies, monkeypatch, tmp_path):
    (first, *_) = load_results([RUNS / machine])[0]
    runs = [dataclasses.replace(first, run=dataclasses.replace(first.run, strategy=name)) for name in strategies]
    drawn = []
    monkeypatch.setattr(plot, "save", lambda made, path: (made.savefig(path), drawn.append(made)))
    plot.draw_comparison(group_runs([measure(run, MetricOptions()) for run in runs]), "title", tmp_path / "compare.png")
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
