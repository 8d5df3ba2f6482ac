from datetime import datetime, timezone
from itertools import pairwise

import pytest
from a_launch import ROOT, Notes, a_launch
from test_sweep import plan_of

from tprimat.analyze.impossible import contradictions
from tprimat.analyze.metrics import joules
from tprimat.core.workload import Layout
from tprimat.launch.run import run
from tprimat.logs.formats.megatron import PRIMUS
from tprimat.records.benchmark_file import RunResult
from tprimat.records.schema import Finding, TelemetrySample
from tprimat.records.store import RunDirectory
from tprimat.runner.logs import FollowedLog

LOGS = ROOT / "tests" / "logs"


def followed(tmp_path, log, *words, batch=128, data=8):
    plan = plan_of(
        tmp_path,
        "r",
        engine="primus",
        gpus_per_node=8,
        layout=Layout(data=data),
        micro_batch_sequences=2,
        global_batch_sequences=batch,
        sequence_tokens=8192,
    )
    began = datetime.now(timezone.utc).isoformat()
    following = FollowedLog(plan, PRIMUS.read_line, began)
    notes = Notes()
    says = ("replay", log) if log else ()
    launch = a_launch(tmp_path, *says, *words, step_of_line=following.step_of_line, complete=following.complete)
    return (*run(launch, notes), notes)


def said(step, seconds):
    return (
        "line",
        f"iteration {step:8d}/      50 | consumed samples: {128 * step:12d} "
        f"| elapsed time per iteration (ms): {1e3 * seconds:.1f} | "
        "learning rate: 1.000000E-05 | global batch size:   128 | lm loss: 1.189700E+01 | grad norm: 7.0 |",
    )


def test_the_last_steps_of_a_log_say_when_they_ended_as_far_as_nothing_came_between(tmp_path):
    words = [*said(1, 0.6), "sleep", 0.6, *said(2, 0.6), "sleep", 2.0, *said(3, 0.6)]  # a validation of 1.4 s before step 3
    words += [word for step in (4, 5, 6, 7) for word in ("sleep", 0.6, *said(step, 0.6))]
    _, steps, _ = followed(tmp_path, None, *words)
    ends = [step.ended_at_seconds for step in steps]
    assert ends[:2] == [None, None]
    assert [after - before for before, after in pairwise(ends[2:])] == pytest.approx([0.6] * 4, abs=0.15)
    assert RunDirectory(tmp_path).read_steps() == steps
    readings = [TelemetrySample(at_seconds=at / 4, gpu=0, power_watts=500.0) for at in range(40)]
    assert joules(readings, steps[3:], 1) == (pytest.approx(4 * 0.6 * 500, rel=0.1), [])
    assert joules(readings, steps, 1) == (None, [Finding(kind="no ends of steps")])


def test_steps_too_short_for_the_clock_of_their_lines_have_no_moments_and_count(tmp_path):
    words = [word for step in range(1, 9) for word in ("sleep", 0.02, *said(step, 0.01))]
    record, steps, _ = followed(tmp_path, None, *words)
    assert [step.ended_at_seconds for step in steps] == [None] * 8
    assert contradictions(RunResult(run=record, steps=steps, path=tmp_path), None) == ()


def test_a_replayed_primus_log_gives_each_step_once_with_its_evidence(tmp_path):
    record, steps, notes = followed(tmp_path, LOGS / "primus_core_v26_5_1.log")
    numbers = [step.step for step in notes.steps]
    assert numbers == sorted(set(numbers))
    assert numbers
    assert {step.step for step in steps} >= set(numbers)
    assert RunDirectory(tmp_path).read_steps() == steps
    assert (record.outcome, record.clock, record.evidence.source) == ("completed", "framework", "log")


def test_a_batch_that_the_log_contradicts_marks_the_run(tmp_path):
    record, *_ = followed(tmp_path, LOGS / "primus_core_v26_5_1.log", batch=64)
    assert "global batch: 64 was asked for, 128 ran" in record.mismatches
    assert not record.counts


def test_a_primus_run_that_fails_keeps_the_steps_before(tmp_path):
    record, steps, _ = followed(
        tmp_path, LOGS / "primus_core_v26_5_1.log", "line", "HIP out of memory. Tried to allocate 3.31 GiB.", "exit", "1"
    )
    assert record.outcome == "out_of_memory"
    assert steps
