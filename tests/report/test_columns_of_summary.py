"""The block of one run: labels in one column, values in another."""

import re
from dataclasses import replace
from pathlib import Path

from runs.make_runs import H100, LAPTOP, a_run, steps_of

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


def test_the_throughput_of_a_cpu_has_its_interval_as_that_of_a_gpu_has():
    for machine, unit in ((LAPTOP, "process"), (H100, "GPU")):
        run = a_run("run", machine=machine)
        steps = tuple(steps_of(run, [1.0 + 0.01 * (n % 5) for n in range(30)], seed=0))
        measured = measure(RunResult(path=Path("run"), run=run, steps=steps), MetricOptions())
        (line,) = (line for line in summary([(run, measured.metrics, Path("log"))]).splitlines() if "throughput" in line)
        assert re.search(rf" tokens/s, [\d,.]+ \[[\d,.]+, [\d,.]+\] tokens/s/{unit}$", line), line


def test_the_number_of_steps_stands_once_where_they_are_too_few_for_an_interval():
    run = a_run("run", machine=LAPTOP)
    measured = measure(RunResult(path=Path("run"), run=run, steps=tuple(steps_of(run, [1.0, 1.0, 2.0], seed=0))), MetricOptions())
    (line,) = (line for line in summary([(run, measured.metrics, Path("log"))]).splitlines() if "median step" in line)
    assert line.count("n = ") == 1, line
