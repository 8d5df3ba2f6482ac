import pytest
from a_launch import Notes, a_launch

from tprimat.core.errors import LaunchError
from tprimat.launch.process_tree import count_oom_kills
from tprimat.launch.run import run
from tprimat.logs.failures import add_log_hint, classify
from tprimat.records.schema import Failure, StepRecord

TORCHRUN_KILLED = """\
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 12854)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 12854
============================================================"""
HIP_MEMORY = (
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity of 128.00 GiB"
    " of which 780.24 MiB is free."
)
COLLECTIVE = (
    "[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
    " Timeout(ms)=600000) ran for 600004 milliseconds before timing out."
)
HEADS = "ValueError: num_attention_heads (28) must be a multiple of tensor_model_parallel_size (8)."


HARMLESS = """\
  error_injection_rate ............................ 0
[W ProcessGroupNCCL.cpp] Warning: WARNING: destroy_process_group() was not called before exit
WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status
Cannot import zarr, support for zarr-based checkpoints is not available. ModuleNotFoundError: No module named 'zarr'
No token throughput for iterations 1-2
NCCL_DEBUG=WARN ncclSystemError
export NCCL_IB_TIMEOUT=NCCL error in
  exitcode  : -15 (pid: 7)
 iteration 1/ 50 | number of nan iterations:   0 |
tprimat run: {"run_id":"r","command":["--data","text:/CUDA out of memory"]}
  check_for_nan_in_loss_and_grad .................. True
  distributed_timeout_minutes ..................... 60
"""


def test_harmless_lines_do_not_classify():
    for line in HARMLESS.splitlines():
        assert classify(1, [line, "RuntimeError: real reason"], []).cause == "RuntimeError: real reason", line


@pytest.mark.parametrize("hint", ["more text, or a shorter --sequence-length", None])
def test_what_a_worker_says_to_try_is_what_the_run_says_to_try(hint):
    error = LaunchError("text:notes has 4 tokens, fewer than one sequence of 64.", why="There is not more of it.", fix=hint)
    log = [
        "try again later",
        *f"tprimat error: {error}".split("\n"),
        "torch.distributed.elastic: rank 1 failed",
        "try   nothing of this",
    ]
    assert classify(2, log, []).hint == hint


KILLED = TORCHRUN_KILLED.split("\n")
ENDED = [line.replace("-9 (pid", "1 (pid") for line in KILLED]
ROOT_OF_RANK_3 = [line for line in ENDED if "SIGKILL" not in line]
NO_EINOPS = [*ENDED[:-2], "traceback : ModuleNotFoundError: No module named 'einops'", ENDED[-1]]
LOST = "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1"
NO_AMDSMI = "No module named 'amdsmi', power is not read"
OF_RANK_3 = ["[rank3]: ValueError: wrong", *ROOT_OF_RANK_3]
TRACEBACK = [
    "Traceback (most recent call last):",
    "  x = 1",
    "KeyError: 'first'",
    "[rank0]: my.pkg.OddError: strange",
    "cleaning up",
]
ORDER = [
    # Memory comes before NaN before configuration before timeouts.
    ([COLLECTIVE, HIP_MEMORY], "The GPU ran out of memory"),
    ([HEADS, "lm loss: nan"], "no longer finite"),
    ([COLLECTIVE, HEADS], "num_attention_heads (28)"),
    ([COLLECTIVE, *KILLED], "killed with SIGKILL"),
    (["ncclSystemError", COLLECTIVE], "A collective operation timed out"),
    # The block of the first rank that failed comes before what other ranks, and libraries on any, say.
    (["[rank0]: OSError: [Errno 28] No space left on device", *NO_EINOPS], "einops"),
    (["error: legacy-install-failure", "[rank3]: " + HIP_MEMORY, *ROOT_OF_RANK_3], "The GPU ran out of memory"),
    ([HIP_MEMORY, f"[rank3]: torch.distributed.DistBackendError: {COLLECTIVE}", *ROOT_OF_RANK_3], "The GPU ran out of memory"),
    (["error: a library's own line", "ValueError: wrong"], "ValueError: wrong"),
    ([NO_AMDSMI, *OF_RANK_3], "ValueError: wrong"),
    ([NO_AMDSMI, "ValueError: wrong"], "ValueError: wrong"),
    (["OSError: [Errno 28] No space left on device", *OF_RANK_3], "ValueError: wrong"),
    # Where nothing is known, the last exception; a lost peer only where nobody says more.
    (["[rank1]: RuntimeError: the gears broke", LOST], "RuntimeError: the gears broke"),
    ([LOST], "lost its connection"),
    ([*TRACEBACK, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "], "my.pkg.OddError: strange"),
]


@pytest.mark.parametrize(("lines", "cause"), ORDER)
def test_of_several_lines_the_cause_is_named_not_its_consequences(lines, cause):
    assert cause in classify(1, lines, []).cause


@pytest.mark.parametrize("code", [-9, 137])
def test_sigkill_is_a_matter_of_memory_only_where_the_kernel_says_so(code):
    assert classify(code, [], [], oom_killed=True).outcome == "out_of_memory"
    assert classify(code, [], []).outcome == "failed"


def test_the_kills_of_other_cgroups_are_not_this_runs(tmp_path):
    files = {"proc/vmstat": "oom_kill 7\n", "proc/self/cgroup": "0::/user/session\n"}
    counts = []
    for name, text in (*files.items(), ("sys/fs/cgroup/user/session/memory.events", "oom 1\noom_kill 1\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        counts.append(count_oom_kills(tmp_path))
    assert counts == [7, 7, 1]


@pytest.mark.parametrize(
    ("code", "outcome", "cause"),
    [
        (-11, "failed", "SIGSEGV"),
        (134, "failed", "SIGABRT"),
        (-15, "interrupted", "SIGTERM"),
        (3, "failed", "exit code 3 and printed nothing"),
        (255, "failed", "exit code 255"),
    ],
)
def test_a_silent_end_is_told_by_its_code(code, outcome, cause):
    failure = classify(code, ["", "  "], [])
    assert failure.outcome == outcome
    assert cause in failure.cause


def steps(losses):
    return [StepRecord(step=n, step_seconds=1.0, loss=loss, finite=loss is not None) for n, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("losses", "cause"),
    [
        ([5.0, None, None], "not finite, first in step 2"),
        ([5.0] * 8 + [7.0, 9.0, 11.0], "grew from 5 to 9"),
        ([], "without a single step"),
    ],
)
def test_an_end_without_an_error_can_still_be_a_failure(losses, cause):
    assert cause in classify(0, [], steps(losses)).cause


@pytest.mark.parametrize("losses", [[5.0, 4.0], [5.0, None, 4.0], [5.0] * 9 + [7.4, 7.4, 7.4], [5.0, 30.0]])
def test_a_bump_is_no_divergence(losses):
    assert classify(0, [], steps(losses)) is None


def test_logs_of_the_ranks_are_searched_too(tmp_path):
    (tmp_path / "ranks" / "rank-3").mkdir(parents=True)
    (tmp_path / "ranks" / "rank-3" / "error.log").write_text(HIP_MEMORY + "\n")
    launch = a_launch(tmp_path, "line", "ChildFailedError", "exit", 1, error_logs=(f"{tmp_path}/ranks/rank-*/error.log",))
    record, _ = run(launch, Notes())
    assert record.outcome == "out_of_memory"
    assert "3.31 GiB" in record.cause


def test_our_own_signal_explains_no_run_that_we_stopped():
    stopped = Failure(outcome="timed_out", cause="The run took longer than run_timeout_seconds (12 s).")
    ours = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 41337 got signal: 15"
    assert add_log_hint(stopped, [ours]) == stopped
    assert "OpType=ALLREDUCE" in add_log_hint(stopped, [ours, COLLECTIVE]).cause
