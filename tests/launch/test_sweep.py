import os
import signal
import time
from pathlib import Path

import pytest
from a_launch import Notes, a_launch, first_record
from changes import replace

from tprimat.config.schema import EngineOptions, OptimizerConfig, ProfilingConfig
from tprimat.core.errors import LaunchError
from tprimat.core.models import model_shape
from tprimat.core.workload import FullWorkload
from tprimat.launch.run import run
from tprimat.plan.schema import RunPlan, write_plan
from tprimat.records.store import RunDirectory
from tprimat.runner.cells import Cell
from tprimat.runner.run import TrainingRun
from tprimat.runner.schedule import Schedule


def plan_of(folder, run_id, **fields):
    given = {
        "run_id": run_id,
        "model": "llama",
        "size": "tiny",
        "strategy": "minimal",
        "engine": "megatron",
        "engine_reason": "asked for",
        "platform": "cpu",
        "nodes": 1,
        "gpus_per_node": 1,
        "workload": FullWorkload(
            shape=model_shape("llama-3.1-8b"), micro_batch_sequences=1, global_batch_sequences=1, sequence_tokens=8
        ),
        "steps": 2,
        "dataset": "mock",
        "tokenizer": None,
        "seed": 1,
        "optimizer": OptimizerConfig(),
        "engine_options": EngineOptions(),
        "profiling": ProfilingConfig(),
        "environment": {},
        "run_directory": str(folder / "runs" / run_id),
        "output_directory": str(folder),
    }
    return replace(RunPlan(**given), **fields)


def cell_of(folder, run_id, **fields):
    return Cell(session=None, plan=plan_of(folder, run_id, **fields))


def run_of(record, steps=()):
    return TrainingRun(record=record, steps=steps, metrics=None, unmeasured=None, benchmark_file=None, log=Path("log"))


class Fake(Schedule):
    """A schedule over the fake trainer, which ends with the exit code that the strategy's name holds."""

    def __init__(self, messages, *cells):
        super().__init__([])
        self.cells, self.said, self.cooldown_seconds = cells, messages, 0.0

    def notify(self, text):
        self.said.append(text)

    def start(self, place, cell):
        plan = cell.plan
        directory = RunDirectory(Path(plan.run_directory))
        write_plan(directory.plan_file, plan)
        started_at = f"2026-01-01T00:00:{len(self.said):02d}.000+00:00"
        record = first_record(run_id=plan.run_id, strategy=plan.strategy, started_at=started_at)
        self.said.append(f"started {plan.run_id}")
        launch = a_launch(directory.path, "steps", 2, "exit", plan.strategy.partition("-")[2] or 0, record=record)
        return run_of(*run(launch, Notes()))

    def load(self, cell, record):
        return run_of(record)

    def differs(self, cell, record):
        return None


@pytest.fixture
def messages():
    return []


def outcomes(results):
    return [(r.cell.plan.run_id, "reused" if r.reused else r.run and r.run.record.outcome) for r in results]


def test_a_failure_stops_no_other_run_and_the_next_call_makes_what_is_missing(messages, tmp_path):
    class Refuses(Fake):
        def start(self, place, cell):
            if cell.plan.run_id == "x":
                raise LaunchError("no such engine.")
            return super().start(place, cell)

    first = [cell_of(tmp_path, "x", seed=2), cell_of(tmp_path, "a"), cell_of(tmp_path, "b", strategy="bad-3")]
    results = Refuses(messages, *first).run()
    assert outcomes(results) == [("x", None), ("a", "completed"), ("b", "failed")]
    assert results[0].cause == "no such engine."
    assert "llama minimal: not started. no such engine." in messages
    again = [cell_of(tmp_path, "c"), cell_of(tmp_path, "d", strategy="bad-3"), cell_of(tmp_path, "e", steps=3)]
    results = Fake(messages, *again).run()
    assert outcomes(results) == [("c", "reused"), ("d", "failed"), ("e", "completed")]
    assert results[0].run.record.run_id == "a"
    assert any(line.startswith("llama minimal: skipped, run a of") for line in messages)


def test_a_run_that_counts_is_reused_once_whatever_the_clock_said_unless_it_has_lost_steps(messages, tmp_path):
    Fake(messages, cell_of(tmp_path, "a")).run()
    newer = RunDirectory(tmp_path / "runs" / "z")
    write_plan(newer.plan_file, plan_of(tmp_path, "z"))
    newer.write_run(first_record(run_id="z", outcome="failed", started_at="2027-01-01T00:00:00.000+00:00"))
    assert outcomes(Fake(messages, cell_of(tmp_path, "b"), cell_of(tmp_path, "c")).run()) == [("b", "reused"), ("c", "completed")]
    for name in "ac":
        steps = tmp_path / "runs" / name / "steps.jsonl"
        steps.write_bytes(steps.read_bytes()[:-5])
    assert outcomes(Fake(messages, cell_of(tmp_path, "d")).run()) == [("d", "completed")]


def test_an_interrupt_ends_the_series_and_keeps_what_was_done(messages, tmp_path, monkeypatch):
    class Interrupted(Fake):
        def notify(self, text):
            super().notify(text)
            if text.startswith("cooling"):
                monkeypatch.setattr(time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGINT))

    schedule = Interrupted(messages, cell_of(tmp_path, "a"), cell_of(tmp_path, "b", seed=2))
    schedule.cooldown_seconds = 30.0
    results = schedule.run()
    assert outcomes(results) == [("a", "completed")]
    assert messages[-1] == "cooling down for 30 s."


def test_a_signal_while_a_run_is_written_breaks_nothing_off_and_starts_no_other(messages, tmp_path):
    written = []

    class Signalled(Fake):
        def start(self, place, cell):
            made = super().start(place, cell)
            os.kill(os.getpid(), signal.SIGTERM)
            written.append(cell.plan.run_id)
            return made

    results = Signalled(messages, cell_of(tmp_path, "a"), cell_of(tmp_path, "b", seed=2)).run()
    assert outcomes(results) == [("a", "completed")]
    assert results[0].stop_signal == signal.SIGTERM
    assert written == ["a"]
    assert "started b" not in messages
