"""What a user sees of a run: until the first step no start is silent for more than ten seconds, then a line for each step."""

import re
from pathlib import Path

import pytest
from changes import replace
from planning import make_plan

from tprimat.analyze.groups import measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.plan.schema import RunPlan
from tprimat.records.discover import load_results
from tprimat.records.schema import StepRecord
from tprimat.report.tables import Screen
from tprimat.runner.progress import Progress, outcome_line, step_line

RUNS = Path(__file__).parents[1] / "runs"


@pytest.fixture
def plan(tmp_path) -> RunPlan:
    return make_plan(tmp_path, "llama", {})


def lines_after(progress, capsys, *seconds):
    for moment in seconds:
        progress.on_wait(moment)
    return capsys.readouterr().err.splitlines()


def test_without_a_terminal_a_line_comes_after_ten_seconds_and_then_each_minute(plan, capsys):
    progress = Progress(plan, None)
    assert lines_after(progress, capsys, 0.1, 5.0, 9.9) == []
    assert lines_after(progress, capsys, 10.0, 10.1, 59.9) == ["  llama waits for its first step, 10 s since the start"]
    (line,) = lines_after(progress, capsys, 60.0, 60.1, 119.9)
    assert re.fullmatch(r".* 60 s since the start; its log: .*training\.log", line)
    assert len(lines_after(progress, capsys, 120.0, 121.0, 180.0, 200.0)) == 2


def test_a_stage_of_the_start_stays_when_warnings_follow_and_the_profiler_is_heard(plan, capsys):
    progress = Progress(plan, None)
    for line in ("loading", "tprimat start-up: model_built", "", "/lib/x.py:3: UserWarning", "profiling: writing the trace ..."):
        progress.on_line(line)
    said = ["  profiling: writing the trace ...", "  llama waits for its first step (model built), 12 s since the start"]
    assert lines_after(progress, capsys, 12.0) == said


STEP = StepRecord(step=3, step_seconds=2.65, tokens=131072, loss=6.4, peak_allocated_bytes=110_700_000_000)
RATES = (49_412.0, 576.1e12)


@pytest.mark.parametrize(("width", "last"), [(130, " · loss 6.400 · 576.1 TFLOP/s/GPU · 103.1 GiB"), (48, " · 18.6 s left")])
def test_a_terminal_gets_the_most_important_parts_first_in_one_line(plan, width, last):
    line = step_line(replace(plan, steps=10), STEP, RATES, Screen(width=width))
    assert line.startswith("  llama step 3/10 · 2.65 s · 18.6 s left")
    assert len(line) < width
    assert line.endswith(last)


def test_the_end_of_a_run_is_one_line_with_its_speed_or_its_cause():
    (result,), _ = load_results([RUNS / "h100" / "runs" / "h100-llama-0"])
    metrics = measure(result, MetricOptions()).metrics
    assert re.fullmatch(
        r"  llama minimal_communication: completed, [\d,]+ tokens/s, .* a step", outcome_line(result.run, metrics)
    )
    (failed,), _ = load_results([RUNS / "h100" / "runs" / "h100-qwen-oom"])
    assert outcome_line(failed.run, None).endswith(": out of memory: CUDA out of memory on rank 3")
