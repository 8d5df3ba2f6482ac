"""The six panels of a comparison, as they lie on the picture."""

import dataclasses
from pathlib import Path

import pytest

from tprimat.analyze.groups import group_runs, measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.record.collect import load_results
from tprimat.report import plot

RUNS = Path(__file__).parents[1] / "runs"
LONG = "a_strategy_whose_name_takes_up_a_third_of_the_width_of_the_picture_and_a_bit"


@pytest.mark.parametrize("strategies", [("a", "b", "c"), (LONG, f"{LONG}_2", f"{LONG}_3")])
def test_the_legend_stays_on_the_picture_however_long_its_labels_are(strategies, monkeypatch, tmp_path):
    (first, *_) = load_results([RUNS / "h100"])[0]
    runs = [dataclasses.replace(first, run=dataclasses.replace(first.run, strategy=name)) for name in strategies]
    drawn = []
    monkeypatch.setattr(plot, "save", lambda made, path: (made.savefig(path), drawn.append(made)))
    plot.draw_comparison(group_runs([measure(run, MetricOptions()) for run in runs]), "title", tmp_path / "compare.png")
    (picture,) = drawn
    (legend,) = (legend for part in picture.subfigs for legend in part.legends)
    extent = legend.get_window_extent()
    assert picture.bbox.x0 <= extent.x0
    assert extent.x1 <= picture.bbox.x1
    steps = [axes for part in picture.subfigs for axes in part.axes if axes.get_xlabel() == "optimizer step"]
    assert all(float(tick).is_integer() for axes in steps for tick in axes.get_xticks())
