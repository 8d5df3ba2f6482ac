"""The six panels of a comparison, as they lie on the picture."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from report.pictures import all_axes, axes_titled, misplaced, titles, words
from runs.make_runs import LAPTOP, MI300X, a_run, step_times, steps_of, write_run

from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.peak import analyze_peaks
from tprimat.core.models import model_shape
from tprimat.records.discover import load_results
from tprimat.records.schema import LogSource
from tprimat.report.names import ranked_workloads
from tprimat.report.plots import MOST_SERIES, drawn
from tprimat.report.plots.comparison import comparison_sheet
from tprimat.report.plots.peak import peak_sheet
from tprimat.runner.analysis import compare_runs, read_results

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"
H200 = ROOT / "benchmarks" / "records" / "h200"
LONG = "a_strategy whose label takes up two thirds of the width of the picture if it is written into one line beside the bars"
QWEN = {"model": "qwen", "shape": model_shape("qwen-2.5-7b")}
TP2 = {"tensor_parallel": 2, "data_parallel": 4}

FEW = "too few runs to call it the winner"


def comparison_of(*paths):
    """What ./compare.py compares in some folders."""
    return compare_runs(read_results(paths, MetricOptions(), {}).measured, paths, None)


def sheet_of(*paths):
    return comparison_sheet(comparison_of(*paths))


def write(folder, run_id, level=4.0, seed=1, **changes):
    run = a_run(run_id, **changes)
    write_run(folder, run, steps_of(run, step_times(level, seed), seed, gigabytes=None if run.machine is LAPTOP else 50.0 + seed))


@pytest.fixture
def sweep(tmp_path):
    """Two models under three strategies."""
    for number, (strategy, layout) in enumerate({"minimal_communication": {}, "balanced": TP2, "quick": TP2}.items()):
        write(tmp_path, f"llama-{strategy}", 4.0 + number / 2, number, strategy=strategy, **layout)
        write(tmp_path, f"qwen-{strategy}", 3.5 + number / 2, number, strategy=strategy, **layout, **QWEN)
    return tmp_path


@pytest.mark.parametrize("folders", [("h100", "mi300x"), ("cpu",), ("foreign",)], ids="+".join)
def test_no_text_leaves_the_picture_or_covers_another(folders):
    with drawn(sheet_of(*(RUNS / name for name in folders))) as picture:
        assert misplaced(picture) == []


@pytest.mark.parametrize("machine", ["h100", "cpu"])
def test_nor_however_long_the_labels_are(machine, tmp_path):
    (first, *_) = load_results([RUNS / machine])[0]
    for number in range(3):
        run = dataclasses.replace(first.run, run_id=f"r{number}", strategy=f"{LONG}_{number}")
        write_run(tmp_path, run, list(first.steps))
    with drawn(sheet_of(tmp_path)) as picture:
        assert misplaced(picture) == []
        steps = [axes for axes in all_axes(picture) if axes.get_xlabel().startswith("optimizer step")]
        assert steps
        assert all(float(tick).is_integer() for axes in steps for tick in axes.get_xticks())


def test_the_one_title_names_a_winner_and_the_line_below_what_ran(sweep):
    sheet = sheet_of(sweep)
    winner = r"llama: minimal_communication ran fastest: 1\d\.\d % \[.*\] ahead of the next, balanced"
    assert re.fullmatch(f"{winner}; {FEW}; 1 more workload", sheet.title)
    assert sheet.subtitle.startswith("2 workloads · megatron · 2026-01-01 · 6 configurations · 6 runs · n = 222 steady steps")
    assert sheet.notes[0].startswith("They differ in strategy (minimal_communication | balanced | quick), layout (")


def test_equal_step_times_beside_others_are_drawn_and_an_imported_log_names_its_framework(tmp_path):
    write(tmp_path, "varied")
    log = LogSource(path="log", sha256="0", dialect="torchtitan")
    equal = a_run("equal", strategy="imported", engine="torchtitan", clock="framework", source=log)
    for run in (a_run("own", strategy="balanced", **TP2), equal):
        write_run(tmp_path, run, steps_of(run, np.full(40, 3.104), 1))
    analysis = analyze_peaks(read_results([tmp_path], MetricOptions(), {}).measured, MetricOptions())
    for sheet in (sheet_of(tmp_path), peak_sheet(analysis)):
        with drawn(sheet) as picture:
            labels = {label.get_text() for axes in all_axes(picture) for label in axes.get_yticklabels()}
        assert any("imported (DP8), torchtitan" in label.replace("\n", " ") for label in labels)


def test_unlike_work_never_shares_a_panel_of_curves_and_one_configuration_has_one_color(sweep):
    with drawn(sheet_of(sweep)) as picture:
        for title in ("Training loss", "Learning rate", "Peak memory in each step", "Step time"):
            llama, qwen = axes_titled(picture, title)
            assert (llama.get_title(loc="center").strip(), qwen.get_title(loc="center").strip()) == ("llama", "qwen")
            assert [line.get_color() for line in llama.lines] == [line.get_color() for line in qwen.lines]
            assert len({line.get_color() for line in llama.lines}) == 3
        (bars,) = axes_titled(picture, "Model throughput")
        colors = [patch.get_facecolor() for patch in bars.patches]
        assert colors[:3] == colors[3:]
        labels = [label.get_text() for label in bars.get_yticklabels()]
        assert labels == [
            *("llama", "minimal_communication (DP8)", "balanced (TP2 DP4)", "quick (TP2 DP4)"),
            *("qwen", "minimal_communication (DP8)", "balanced (TP2 DP4)", "quick (TP2 DP4)"),
        ]


@pytest.mark.parametrize(
    ("folders", "kind"),
    [
        ((H200 / "engine" / "dp_mbs4", H200 / "torchtitan" / "dp_mbs4"), "reserved"),
        ((H200 / "nemo-cuda-graphs",), "reserved"),
        ((H200 / "engine" / "dp_mbs4",), "allocated"),
    ],
)
def test_memory_is_of_one_kind_for_all_and_both_panels_name_it(folders, kind):
    """Of two configurations, one tells nothing but what was reserved; CUDA graphs hold tensors that do not count as allocated."""
    with drawn(sheet_of(*folders)) as picture:
        (bars,) = axes_titled(picture, "Peak memory, worst rank")
        assert bars.get_xlabel().startswith(f"GiB {kind} in steady steps")
        curves = axes_titled(picture, "Peak memory in each step")
        assert curves[0].get_ylabel() == f"GiB {kind}"
        ends = {round(float(line.get_ydata()[-1]), 3) for axes in curves for line in axes.lines}
        assert ends == {round(patch.get_width(), 3) for patch in bars.patches}
        assert len(bars.patches) == (2 if kind == "reserved" else 1)


def test_eight_configurations_are_in_color_and_the_rest_are_named_and_grey(tmp_path):
    for number in range(11):
        write(tmp_path, f"r{number:02}", 4 + number / 10, number, strategy=f"choice_{number}")
    with drawn(sheet_of(tmp_path)) as picture:
        (loss,), (memory,) = axes_titled(picture, "Training loss"), axes_titled(picture, "Peak memory in each step")
        picture.draw_without_rendering()
        assert loss.bbox.x0 == pytest.approx(memory.bbox.x0, abs=0.5), "panels below each other are aligned"
        assert len(loss.lines) == MOST_SERIES
        (bars,) = axes_titled(picture, "Model throughput")
        assert len({patch.get_facecolor() for patch in bars.patches}) == MOST_SERIES + 1
        assert len({patch.get_facecolor() for patch in bars.patches[MOST_SERIES:]}) == 1
        assert [label.get_text() for label in bars.get_yticklabels()] == [f"choice_{number} (DP8)" for number in range(11)]
        assert any(text.startswith("Gray: 3 more configurations") for text in words(picture))


def test_panels_without_data_leave_no_hole(tmp_path):
    run = a_run("bare", machine=LAPTOP, data_parallel=2)
    steps = [dataclasses.replace(step, loss=None, learning_rate=None) for step in steps_of(run, step_times(2.0, 3), 3, None)]
    write_run(tmp_path, run, steps)
    with drawn(sheet_of(tmp_path)) as picture:
        assert titles(picture) == ["Throughput per process in tokens/s", "Step time"]
        assert not any("not recorded" in text for text in words(picture))
        assert picture.get_figheight() < 7


def test_start_up_does_not_own_the_axis_of_step_times(tmp_path):
    run = a_run("slow-start")
    write_run(tmp_path, run, steps_of(run, np.array([60.0, 9.0, *(2 + 0.01 * (i % 3) for i in range(20))]), 7))
    with drawn(sheet_of(tmp_path)) as picture:
        (axes,) = axes_titled(picture, "Step time")
        low, high = axes.get_ylim()
        heights = [height for line in axes.lines for height in line.get_ydata()]
        assert high < 3
        assert all(low <= height <= high for height in heights)
        assert "start-up left out" in axes.get_xlabel()


def test_labels_say_what_differs_in_the_words_of_the_field(tmp_path):
    write(tmp_path, "a", 4.0, 1, strategy="tp2_mbs4", micro_batch_sequences=4, **TP2)
    write(tmp_path, "b", 4.2, 2, strategy="dp_mbs4", micro_batch_sequences=4)
    write(tmp_path, "c", 4.4, 3, strategy="dp_mbs4", micro_batch_sequences=4, engine="nemo")
    write(
        tmp_path, "d", 4.6, 4, strategy="dp_mbs4", micro_batch_sequences=4, machine=MI300X, engine_options={"fused_adam": False}
    )
    with drawn(sheet_of(tmp_path)) as picture:
        (bars,) = axes_titled(picture, "Model throughput")
        labels = [label.get_text() for label in bars.get_yticklabels()]
    assert sorted(labels) == [
        "H100 SXM dp_mbs4 (DP8) megatron",
        "H100 SXM dp_mbs4 (DP8) nemo",
        "H100 SXM tp2_mbs4 (TP2 DP4) megatron",
        "MI300X dp_mbs4 (DP8) megatron",
    ]


def test_folders_that_are_compared_are_named_as_the_user_wrote_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [Path("before"), Path("after")]
    for number, folder in enumerate(folders):
        write(folder, f"r{number}", 4.0 + number, number)
    measured = read_results(folders, MetricOptions(), {}).measured
    title = comparison_sheet(compare_runs(measured, folders, "before")).title
    assert re.fullmatch(rf"before ran fastest: 2\d\.\d % \[.*\] ahead of the next, after; {FEW}", title)


def test_a_failed_run_is_named_below_the_others(tmp_path):
    write(tmp_path, "fine")
    write_run(tmp_path, a_run("failed", strategy="balanced", outcome="out_of_memory", exit_code=1, cause="no memory"), [])
    sheet = sheet_of(tmp_path)
    assert re.match(r"llama trains at 65,5\d\d tokens/s on 8 x H100 SXM", sheet.title)
    assert "Not counted: failed (out of memory)." in sheet.notes


def test_a_model_cut_to_fewer_layers_is_not_taken_for_the_whole_one(tmp_path):
    cut = dataclasses.replace(model_shape("llama-3.1-8b"), name="llama-3.1-8b-20-layers", layers=20)
    for number, shape in enumerate((model_shape("llama-3.1-8b"), cut)):
        write(tmp_path, f"a-{number}", 4.0 + number, number, shape=shape)
        write(tmp_path, f"b-{number}", 4.5 + number, number, shape=shape, strategy="balanced", **TP2)
    named = sorted(work.title for work in ranked_workloads(comparison_of(tmp_path).rankings))
    assert named == ["llama", "llama (llama-3.1-8b-20-layers)"]


@pytest.mark.parametrize(
    ("folders", "works"),
    [
        (("moe/capacity", "moe/later"), ("expert capacity 1.25", "expert capacity unlimited")),
        (
            ("whole-model-on-one-gpu/llama_mbs1", "whole-model-on-one-gpu/llama_mbs1_states"),
            ("optimizer states in fp32", "optimizer states in bf16"),
        ),
        (("engine/dp_mbs4", "torchtitan/dp_mbs4"), ("TPrimat clock", "framework clock")),
    ],
)
def test_what_the_text_refuses_to_compare_has_a_heading_each_and_no_winner(folders, works):
    sheet = sheet_of(*(H200 / name for name in folders))
    assert works[0] in sheet.title
    assert not re.search(r"fastest|highest|leads|ahead|faster", sheet.title)
    with drawn(sheet) as picture:
        (bars,) = axes_titled(picture, "Model throughput")
        labels = [label.get_text() for label in bars.get_yticklabels()]
        assert (labels[0], labels[2]) == works
        assert len(labels) == 4
        assert len(axes_titled(picture, "Step time")) == 2
