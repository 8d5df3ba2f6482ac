"""The block of one run: labels in one column, values in another."""

from dataclasses import replace
from pathlib import Path

from runs.make_runs import a_run, steps_of

from tprimat.analyze.groups import measure
from tprimat.analyze.metrics import MetricOptions
from tprimat.records.benchmark_file import RunResult
from tprimat.report.summary import VALUES, summary


def test_values_stand_in_one_column_also_those_of_a_mixture():
    run = a_run("mixture")
    steps = tuple(
        replace(step, expert_load=15.0, rank_load=1.2) for step in steps_of(run, [1.0 + 0.01 * n for n in range(30)], seed=0)
    )
    measured = measure(RunResult(path=Path("mixture"), run=run, steps=steps), MetricOptions())
    lines = summary([(run, measured.metrics, Path("log"))]).splitlines()[1:]
    assert any(line.startswith("  busiest expert 15") for line in lines)
    assert all(line[VALUES - 1] == " " != line[VALUES] for line in lines), lines
