"""What programs say when they fail: each wording has its outcome and cause, whatever other ranks say after it."""

from pathlib import Path

import pytest

from tprimat.logs.failures import cause_in, classify, meaningful

WATCHDOG = (
    "[rank0]:[E ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)",
    "[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited",
    "[rank2]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:1",
)
WORDINGS = (Path(__file__).parent / "wordings.tsv").read_text(encoding="utf8").splitlines()
"""For each wording whether it comes first or is said by ranks that wait, its outcome, words of its cause, where it was reported,
and its lines."""
HARMLESS = (
    "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "If you run out of memory, lower the batch",
    "Your job may be preempted at any time; the node is then given to another",
    "NCCL_DEBUG=INFO",
)


def cause_of(*lines):
    return cause_in(meaningful(lines), ())


@pytest.mark.parametrize("wording", WORDINGS)
def test_each_wording_has_its_outcome_and_cause_before_and_after_what_other_ranks_say(wording):
    kind, outcome, cause, _, text = wording.split("\t", 4)
    first, *rest = text.split("\\n")
    failure = classify(1, ["starting", f"\x1b[31m{first}\x1b[0m", *rest, "bye"], [])
    assert (failure.outcome, cause in failure.cause) == (outcome, True), failure
    assert "\x1b" not in (failure.evidence or "")
    if kind == "first":
        assert all(cause in cause_of(*lines).cause for lines in ((first, *rest, *WATCHDOG), (*WATCHDOG, first, *rest)))
    else:
        assert "bad vocabulary" in cause_of(first, *rest, "[rank3]: ValueError: bad vocabulary").cause


def test_ranks_that_wait_are_the_cause_only_where_nothing_else_is():
    assert "A collective operation timed out" in cause_of(*WATCHDOG).cause
    assert cause_of(*HARMLESS) is None
    assert cause_of(*WATCHDOG).hint.endswith("; waiting: rank 0")
    assert cause_of(f"[rank0]: {WATCHDOG[0].replace('[Rank 0]', '[Rank 4]')}").hint.endswith("; waiting: rank 4")
    for line in (
        "srun: error: node07: tasks 0-7: Exited with exit code 1",
        "failed (exitcode: 1) local_rank: 3 (pid: 14) of binary",
        "[ERROR] [launch.py:321:sigkill_handler] ['python', 'train.py'] exits with return code = 1",
        "Pod: kubeflow.train-worker-0 exited with code 1",
        "Job has reached the specified backoff limit",
    ):
        assert cause_of(line).cause == f"A process ended with an error: {line}"
        assert cause_of(line, "[rank3]: ValueError: x").cause == "ValueError: x"


def test_memory_that_another_process_holds_is_no_reason_for_a_smaller_batch():
    full, use = "CUDA out of memory. Tried to allocate 2.00 GiB. ", "Process {} has {} GiB memory in use. "
    for line in (
        full + use.format(11, 52.10) + use.format(12, 26.03),
        "CUDA Error: out of memory at /w/csrc/cumem_allocator.cpp:62",
    ):
        assert cause_of(line).hint.startswith("another process holds much")
    assert cause_of(full + use.format(11, 78.13)).hint.startswith("lower --micro-batch-size"), "its own, in a container"


def test_an_abort_is_the_cause_only_where_nothing_else_is():
    for line in (
        "*** SIGABRT received by PID 9361 (TID 9361) on cpu 40",
        "[node07:14] Signal: Aborted (6)",
        "Fatal Python error: Aborted",
    ):
        assert cause_of(line).cause == f"A process aborted itself: {line}"
        assert "A collective operation timed out" in cause_of(*WATCHDOG, line).cause
    exits = ("KeyError: 'total_iters'", "SystemExit")  # intelligent-machine-learning/dlrover#977
    assert cause_of(*exits).cause == "KeyError: 'total_iters'"


def test_the_reason_of_nccl_is_the_line_after_last_error():
    lines = ["[rank2]: torch.distributed.DistBackendError: NCCL error in: x.cpp:77, unhandled cuda error", "[rank2]: Last error:"]
    assert "fabric of a node is not ready" in cause_of(*lines, "[rank2]: Cuda failure 802 'system not yet initialized'").cause
    assert cause_of(*lines, "[rank2]: Error: socket 7").cause == "NCCL (RCCL) failed: Error: socket 7"


def test_torchruns_block_without_a_reason_names_its_first_rank():
    block = "Root Cause (first observed failure):|[0]:|  host : c561|  rank : 0 (local_rank: 0)|  exitcode  : 1 (pid: 7)"
    failure = cause_of("  exitcode  : 1 (pid: 9)", *block.split("|"))
    assert (failure.cause, failure.outcome) == ("A process ended with an error: exitcode : 1 (pid: 7)", "failed")
    assert failure.hint.endswith("; rank 0 (local_rank: 0) on c561 failed first")


def test_what_a_scheduler_kills_after_a_lost_node_or_at_its_limit_is_no_cause():
    killed = "srun: error: node07: tasks 8-15: Killed"
    for reason, cause in (("NODE FAILURE, SEE LOG", "The scheduler lost a node"), ("TIME LIMIT", "at its time limit")):
        assert cause in cause_of(killed, f"slurmstepd: error: *** STEP 7 ON n3 CANCELLED AT 2026 DUE TO {reason}").cause
    ended = "slurmstepd: error: *** STEP 7.0 ON node03 CANCELLED AT 2026-03-03T03 ***"  # by srun, since a task of it failed
    assert cause_of("[rank3]: ValueError: x", ended, killed).cause == "ValueError: x"
    requeued = "slurmstepd: error: *** JOB 608 ON n3 CANCELLED AT 2022-08-12T02:06:12 DUE TO JOB REQUEUE ***"
    assert "failed first" not in cause_of(requeued, "srun: error: n3: tasks 2-3: Exited with exit code 1").hint
    assert "task ended" in cause_of(killed, "slurmstepd: error: *** STEP 7.0 ON node03 CANCELLED AT 2026-03-03T03 ***").cause


def test_a_terse_exception_has_its_condition_or_its_place():
    frame = '[rank0]:   File "/opt/megatron/checkpointing.py", line 1818, in load_checkpoint'
    assert cause_of(frame, "[rank0]: KeyError: 'state'").cause == "KeyError: 'state' (checkpointing.py, line 1818)"
    asserted = ("(head, rank=0, pid=4773)     assert self.lengths.shape[0] == 7", "(head, rank=0, pid=4773) AssertionError")
    assert cause_of(*asserted).cause == "AssertionError: assert self.lengths.shape[0] == 7"


def test_an_exception_of_any_name_ends_a_traceback():
    traceback = ("Traceback (most recent call last):", '  File "x.py", line 1')
    for line in ("torch._dynamo.exc.Unsupported: call_method", "grpc._channel._InactiveRpcError: <x>", "SystemExit: 2"):
        assert cause_of(*traceback, line).cause == line
    assert cause_of("torch.distributed.DeviceMesh: 2 x 4") is None


def test_a_signal_is_the_cause_however_a_launcher_writes_it_and_not_the_one_that_ends_the_others():
    for line in (
        "[2023-06-08 12:05:00,002] [ERROR] [launch.py:325:sigkill_handler] ['python', 'x.py'] exits with return code = -9",
        "torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: -9) local_rank: 5 (pid: 1) of binary: python",
        "  exitcode   : -9 (pid: 4711)",
        "train.sh: line 33: 238568 Killed                  python pretrain_gpt.py",
    ):
        assert cause_of("  exitcode   : -15 (pid: 4710)", line).cause == "A process was killed with SIGKILL."
