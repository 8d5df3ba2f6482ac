"""The catalogue of metrics: one value, one sort key and one format wherever a metric appears."""

import dataclasses
import re
from operator import attrgetter
from pathlib import Path

import pytest
from changes import groups_of
from runs.make_runs import a_run, step_times, steps_of, write_run

from tprimat.analyze.groups import measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.cli.main import start
from tprimat.records.discover import load_results
from tprimat.report.catalogue import COLUMNS, LOSS, PEAK_MEMORY, RUNS

RUN_FILES = Path(__file__).parent.parent / "runs"


def page_with(folder, **fields_of_second):
    """The page on two repeated runs, of which the second's steps differ in some fields, and on a slower configuration."""
    for seed, (name, seconds, strategy) in enumerate((("first", 4.0, "fast"), ("second", 4.0, "fast"), ("slow", 4.6, "slow"))):
        run = a_run(name, strategy=strategy)
        changes = fields_of_second if name == "second" else {}
        steps = [dataclasses.replace(step, **changes) for step in steps_of(run, step_times(seconds, seed), seed)]
        write_run(folder, run, steps)
    start("report", "tprimat report", [str(folder / "runs"), "--output", str(folder / "report.html")])
    return (folder / "report.html").read_text("utf8")


def cell(page, heading):
    """Sort key and text of a column in the first row."""
    column = re.search(rf'<td data-label="{heading}" data-sort="([^"]*)"><span>([^<]*)', page)
    return column.groups()


def test_the_page_sorts_by_the_worst_memory_that_it_shows(tmp_path):
    key, text = cell(page_with(tmp_path, peak_allocated_bytes=70 * 2**30), "peak memory")
    assert (float(key), text) == (pytest.approx(70 * 2**30), "70.0 GiB")


def test_a_loss_that_one_run_lacks_has_neither_a_text_nor_a_sort_key(tmp_path):
    page = page_with(tmp_path, loss=None)
    assert cell(page, "loss") == ("", "–")


def test_every_key_is_a_field_of_the_metrics_of_a_run():
    results = load_results([RUN_FILES / "h100"])[0]
    metrics = measure(results[0], MetricOptions()).metrics
    for metric in {*COLUMNS} - {RUNS}:
        attrgetter(metric.key)(metrics)
    assert len({metric.heading for metric in COLUMNS}) == len(COLUMNS)


def test_memory_is_the_largest_of_the_runs_and_a_loss_their_mean():
    results = [result for result in load_results([RUN_FILES / "h100"])[0] if "llama-" in result.run.run_id]
    group = groups_of(*results)[0]
    metrics = [item.metrics for item in group.runs]
    assert PEAK_MEMORY.value(group) == max(one.peak_memory_bytes for one in metrics)
    assert LOSS.value(group) == pytest.approx(sum(one.final_loss for one in metrics) / len(metrics))


def test_losses_after_different_numbers_of_steps_have_no_mean():
    results = [result for result in load_results([RUN_FILES / "h100"])[0] if "llama-" in result.run.run_id]
    short = dataclasses.replace(results[0], steps=results[0].steps[:-3])
    group = groups_of(short, *results[1:])[0]
    assert len(group.runs) > 1
    assert LOSS.value(group) is None
