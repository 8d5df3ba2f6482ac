import os
import signal
import time
from pathlib import Path

import pytest
from a_launch import Notes, a_launch, first_record
from changes import replace
from planning import make_plan

from tprimat.core.errors import LaunchError
from tprimat.launch.run import run
from tprimat.plan.schema import write_plan
from tprimat.records.store import RunDirectory
from tprimat.runner import schedule
from tprimat.runner.cells import Cell
from tprimat.runner.run import TrainingRun
from tprimat.runner.schedule import run_in_order


def plan_of(folder, run_id, **fields):
    plan = make_plan(
        folder / "runs" / run_id, "llama", {"hardware.platforms.cpu.gpus_per_node": 1, "training.duration.max_steps": 2}
    )
    return replace(plan, **{"output_directory": str(folder), "strategy": "minimal", **fields})


def cell_of(folder, run_id, **fields):
    return Cell(session=None, plan=plan_of(folder, run_id, **fields))


def run_of(record, steps=()):
    return TrainingRun(record=record, steps=steps, metrics=None, unmeasured=None, benchmark_file=None, log=Path("log"))


@pytest.fixture
def messages(monkeypatch):
    """What the user is told. The fake trainer stands in for runs: it ends with the exit code that the strategy's name holds."""
    said = []

    def make(cell, logs, group, which):
        plan = cell.plan
        if plan.run_id == "x":
            raise LaunchError("no such engine.")
        directory = RunDirectory(Path(plan.run_directory))
        write_plan(directory.plan_file, plan)
        started_at = f"2026-01-01T00:00:{len(said):02d}.000+00:00"
        record = first_record(run_id=plan.run_id, strategy=plan.strategy, started_at=started_at)
        said.append(f"started {plan.run_id}")
        launch = a_launch(directory.path, "steps", 2, "exit", plan.strategy.partition("-")[2] or 0, record=record)
        return run_of(*run(launch, Notes()))

    monkeypatch.setattr(schedule, "say", said.append)
    monkeypatch.setattr(schedule, "make_run", make)
    monkeypatch.setattr(schedule, "load_run", lambda session, record: run_of(record))
    monkeypatch.setattr(schedule, "differs_here", lambda cell, record: None)
    monkeypatch.setattr(schedule, "cooldown", lambda cell: 0.0)
    return said


def outcomes(results):
    return [(r.cell.plan.run_id, "reused" if r.reused else r.run and r.run.record.outcome) for r in results]


def test_a_failure_stops_no_other_run_and_the_next_call_makes_what_is_missing(messages, tmp_path):
    first = [cell_of(tmp_path, "x", seed=2), cell_of(tmp_path, "a"), cell_of(tmp_path, "b", strategy="bad-3")]
    results = run_in_order(first)
    assert outcomes(results) == [("x", None), ("a", "completed"), ("b", "failed")]
    assert results[0].cause == "no such engine."
    assert "llama minimal: not started. no such engine." in messages
    again = [cell_of(tmp_path, "c"), cell_of(tmp_path, "d", strategy="bad-3"), cell_of(tmp_path, "e", steps=3)]
    results = run_in_order(again)
    assert outcomes(results) == [("c", "reused"), ("d", "failed"), ("e", "completed")]
    assert results[0].run.record.run_id == "a"
    assert any(line.startswith("llama minimal: skipped, run a of") for line in messages)


def test_a_run_that_counts_is_reused_once_whatever_the_clock_said_unless_it_has_lost_steps(messages, tmp_path):
    run_in_order([cell_of(tmp_path, "a")])
    newer = RunDirectory(tmp_path / "runs" / "z")
    write_plan(newer.plan_file, plan_of(tmp_path, "z"))
    newer.write_run(first_record(run_id="z", outcome="failed", started_at="2027-01-01T00:00:00.000+00:00"))
    both = run_in_order([cell_of(tmp_path, "b"), cell_of(tmp_path, "c")])
    assert outcomes(both) == [("b", "reused"), ("c", "completed")]
    for name in "ac":
        steps = tmp_path / "runs" / name / "steps.jsonl"
        steps.write_bytes(steps.read_bytes()[:-5])
    assert outcomes(run_in_order([cell_of(tmp_path, "d")])) == [("d", "completed")]


def test_a_signal_in_a_run_or_after_it_ends_the_series_and_keeps_what_was_done(messages, tmp_path, monkeypatch):
    cells, make = [cell_of(tmp_path, "a"), cell_of(tmp_path, "b", seed=2)], schedule.make_run
    with monkeypatch.context() as waits:
        waits.setattr(schedule, "cooldown", lambda cell: 30.0)
        waits.setattr(time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGINT))
        waits.setattr(schedule, "make_run", lambda cell, *more: run_of(first_record(run_id=cell.plan.run_id)))
        assert outcomes(run_in_order(cells)) == [("a", "running")]
        assert messages[-1] == "cooling down for 30 s."

    def signalled(*given):
        made = make(*given)
        os.kill(os.getpid(), signal.SIGTERM)
        return made

    monkeypatch.setattr(schedule, "make_run", signalled)
    results = run_in_order(cells)
    assert (outcomes(results), results[0].stop_signal) == ([("a", "completed")], signal.SIGTERM)
    assert "started b" not in messages
