from a_launch import ROOT, Notes, a_launch
from test_sweep import plan_of

from tprimat.core.workload import Layout
from tprimat.launch.run import run
from tprimat.logs.formats import primus
from tprimat.records.store import RunDirectory
from tprimat.runner.followed import FollowedLog

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
    following = FollowedLog(plan, primus.DIALECT.read_line)
    notes = Notes()
    says = ("replay", log) if log else ()
    launch = a_launch(tmp_path, *says, *words, step_of_line=following.step_of_line, complete=following.complete)
    return (*run(launch, notes), notes)


def test_a_replayed_primus_log_gives_each_step_once_with_its_evidence(tmp_path):
    record, result, notes = followed(tmp_path, LOGS / "primus_core_v26_5_1.log")
    numbers = [step.step for step in notes.steps]
    assert numbers == sorted(set(numbers))
    assert numbers
    assert {step.step for step in result.steps} >= set(numbers)
    assert RunDirectory(tmp_path).read_steps() == result.steps
    assert (record.outcome, record.clock, record.evidence.source) == ("completed", "framework", "log")


def test_a_batch_that_the_log_contradicts_marks_the_run(tmp_path):
    record, *_ = followed(tmp_path, LOGS / "primus_core_v26_5_1.log", batch=64)
    assert "global batch: 64 was asked for, 128 ran" in record.mismatches
    assert not record.counts


def test_a_primus_run_that_fails_keeps_the_steps_before(tmp_path):
    record, result, _ = followed(
        tmp_path, LOGS / "primus_core_v26_5_1.log", "line", "HIP out of memory. Tried to allocate 3.31 GiB.", "exit", "1"
    )
    assert record.outcome == "out_of_memory"
    assert result.steps
