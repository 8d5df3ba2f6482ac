"""visualize_peak_throughput.py as a user starts it: real processes, real pictures."""

from pathlib import Path

from commands import run_command, words_in
from report.pictures import axes_titled, misplaced, titles
from runs.make_runs import a_run, step_times, steps_of, write_run

from tprimat.analyze.metrics import MetricOptions
from tprimat.analyze.peak import analyze_peaks
from tprimat.core.models import model_shape
from tprimat.report.plots import drawn, peak
from tprimat.runner.analysis import read_results

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "runs"
TITLES = ["Peak throughput of the whole machine", "Compute of each GPU", "Utilization, every configuration", "Mean step time"]


def draw(*arguments, cwd):
    return run_command("visualize_peak_throughput.py", *arguments, cwd=cwd)


def test_panels_have_figures_and_counts_and_a_refusal_is_told(tmp_path):
    done = draw("--results-dir", RUNS / "published", "--output", "peak.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = words_in(tmp_path / "peak.svg")
    assert {word for word in shown if word in TITLES} == set(TITLES)
    assert "87,933 (n = 1 run, 11 steps)" in shown
    assert "43.5 %" in shown
    assert any(text.startswith("Not compared: ") and "tokens a step" in text for text in shown)
    assert "Peak throughput: qwen on 8 x MI300X in bf16, 87,933 tokens/s, 36.7 % of its matrix peak, 1 run; 1 more model" in shown


def test_every_panel_of_a_sweep_keeps_like_with_like(tmp_path):
    levels = {"balanced": (2, 4.1), "minimal_communication": (1, 3.9), "maximum_performance": (4, 4.3), "slow": (8, 9.0)}
    for model, shape in (("llama", "llama-3.1-8b"), ("qwen", "qwen-2.5-7b")):
        for number, (strategy, (tensor, level)) in enumerate(levels.items()):
            layout = {"tensor_parallel": tensor, "data_parallel": 8 // tensor, "strategy": strategy}
            run = a_run(f"{model}-{strategy}", model=model, shape=model_shape(shape), **layout)
            write_run(tmp_path, run, steps_of(run, step_times(level, number), number, 50.0 / tensor + number))
    analysis = analyze_peaks(read_results([tmp_path], MetricOptions(), {}).measured, MetricOptions())
    with drawn(peak.peak_sheet(analysis)) as picture:
        assert misplaced(picture) == []
        assert titles(picture) == TITLES
        step, utilization = axes_titled(picture, "Mean")[0], axes_titled(picture, "Util")[0]
        assert [bar.get_facecolor() for bar in step.patches] == [bar.get_facecolor() for bar in utilization.patches]
        assert "qwen" in [label.get_text() for label in utilization.get_yticklabels()]
