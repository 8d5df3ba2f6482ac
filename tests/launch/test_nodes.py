"""Several launchers, one run: each test starts the launchers of two nodes on this machine, with a fake trainer for the ranks."""

import dataclasses
import json
import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from a_launch import ROOT, Notes, a_launch, wait_for
from forks import Fork

from tprimat.core.errors import LaunchError
from tprimat.hardware.nodes import Nodes
from tprimat.launch.agreement import Hello, Member, NodeGroup
from tprimat.launch.process import Ending
from tprimat.launch.process_tree import in_signal_set
from tprimat.launch.run import Attempt
from tprimat.logs.failures import classify, earliest
from tprimat.plan.schema import read_plan
from tprimat.records.environment import processor_name
from tprimat.records.schema import Failure, NodeRecord
from tprimat.records.store import RunDirectory
from tprimat.runner.nodes import refuse_unlike

NODE = str(Path(__file__).parent / "a_node.py")
TRAINS = ("pace", 0.02, "steps", 4)


@pytest.fixture
def node(tmp_path, cookie):
    """Start the launcher of a node; its output folder is `out`."""
    del cookie  # ends what a test leaves behind
    port, started = free_port(), []

    def start(rank, *words, flags=(), **environment):
        command = [NODE, "--nodes", "2", "--gpus", "1", "--platform", "cpu", "--model", "llama"]
        command += ["--steps", "4", "--output-dir", "out", "--set", "benchmarking.meeting_timeout_seconds=20", *map(str, flags)]
        given = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NODE_RANK": str(rank),
            "FAKE_WORDS": json.dumps(words[0] if isinstance(words[0], dict) else list(map(str, words))) if words else "[]",
        }
        said = tmp_path / f"said-{len(started)}"
        started.append(Fork(command, said, cwd=tmp_path, env={**os.environ, **given, **environment}))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def ends(*processes):
    """Exit status and output of each launcher."""
    return [process.ended() for process in processes]


def the_record(folder):
    (path,) = (folder / "out" / "runs").glob("*/run.json")
    return RunDirectory(path.parent).read_run()


def test_two_launchers_make_one_run_and_the_first_one_decides_what_counts(node, tmp_path, left_behind):
    variables = {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO"}  # what is printed tunes nothing
    follower = node(1, "line", "hello from node 1", flags=["--runs", 2], **variables)
    first = node(0, *TRAINS, flags=["--runs", 2], NCCL_IB_TIMEOUT="22")
    (status, said), (other_status, other_said) = ends(first, follower)
    assert (status, other_status) == (0, 0), said + other_said
    runs = sorted((tmp_path / "out" / "runs").iterdir())
    assert len(runs) == 2
    for run in runs:
        record, log = RunDirectory(run).read_run(), (run / "node-1" / "training.log").read_text()
        assert (record.outcome, record.machine.nodes, [n.host for n in record.nodes]) == (
            "completed",
            2,
            [socket.gethostname()] * 2,
        )
        seen, here = (json.loads(text.splitlines()[0]) for text in (log, (run / "training.log").read_text().split("\n", 2)[2]))
        assert "hello from node 1" in log
        assert seen["store"] == here["store"], "the ranks of both nodes meet at one place"
        assert (seen["rank"], seen["folder"]) == (1, str(run / "node-1"))
        assert read_plan(run / "node-1" / "plan.json").run_id == read_plan(run / "plan.json").run_id == run.name
        assert {(one.processor, one.cores) for one in record.nodes} == {(processor_name(), len(os.sched_getaffinity(0)))}
        assert [one.other_variables for one in record.nodes] == [{}, {"NCCL_ALGO": "Ring", "NCCL_IB_TIMEOUT": None}]
    assert f"NCCL_ALGO is not set on node 0, and Ring on node 1 ({socket.gethostname()})" in " ".join(said.split())
    assert not left_behind()


def test_a_node_that_never_comes_and_a_first_node_that_cannot_be_found_are_named_at_once(node, tmp_path):
    soon = ["--set", "benchmarking.meeting_timeout_seconds=2"]
    launchers = [
        node(0, *TRAINS, flags=soon),
        node(1, *TRAINS, flags=soon, MASTER_PORT=str(free_port())),
        node(1, *TRAINS, flags=soon, MASTER_ADDR="nowhere.invalid"),
    ]
    expected = [
        "Node 1 of 2 did not join within 2 s.",
        "The first node, 127.0.0.1, did not answer on port",
        "The first node, nowhere.invalid, did not answer on port",
    ]
    for (status, text), words in zip(ends(*launchers), expected, strict=True):
        assert status == 2
        assert words in text
    assert not (tmp_path / "out" / "runs").exists()


def test_a_signal_ends_the_wait_for_the_first_node(node, left_behind):
    launcher = node(1, *TRAINS, flags=["--set", "benchmarking.meeting_timeout_seconds=100"])
    wait_for(lambda: in_signal_set("SigCgt", launcher.pid, signal.SIGUSR2))  # it waits
    began = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    ((status, _),) = ends(launcher)
    assert time.monotonic() - began < 10
    assert status == 143
    assert not left_behind()


def test_a_lost_node_ends_the_run_and_is_named_and_a_sweep_repeats_what_it_cut_off(node, tmp_path, left_behind):
    more = ["--sweep", "micro_batch_size=1,2"]
    first, follower = node(0, *TRAINS, "sleep", 100, flags=more), node(1, "sleep", 100, flags=more)
    wait_for(lambda: list(tmp_path.glob("out/runs/*/steps.jsonl")) and list(tmp_path.glob("out/runs/*/node-1/training.log")))
    follower.kill()
    ((status, _),) = ends(first)
    lost = f"Node 1 ({socket.gethostname()}) was lost: no sign of it for 3 s."
    causes = {RunDirectory(path).read_run().cause for path in (tmp_path / "out" / "runs").iterdir()}
    assert causes == {lost, f"{lost} No further run can start."}
    (status_again, said), _ = ends(node(0, *TRAINS, flags=more), node(1, flags=more))
    assert (status, status_again) == (1, 0), said
    assert "skipped" not in said
    outcomes = [RunDirectory(path).read_run().outcome for path in sorted((tmp_path / "out" / "runs").iterdir())]
    assert sorted(outcomes) == ["completed", "completed", "failed", "interrupted"]
    wait_for(lambda: not left_behind())


def test_when_the_first_node_dies_the_others_stop_their_ranks(node, tmp_path, left_behind):
    first, follower = node(0, "sleep", 100), node(1, "sleep", 100)
    wait_for(lambda: list(tmp_path.glob("out/runs/*/node-1/training.log")))
    first.kill()
    ((status, text),) = ends(follower)
    assert status == 1
    assert "node 1 of 2: the first node was lost" in text
    wait_for(lambda: not left_behind())


def test_failures_a_hang_and_a_signal_stop_all_nodes_and_are_told_by_the_node_where_they_began(node, tmp_path, left_behind):
    recorded = json.loads((Path(__file__).parent / "flight_records.json").read_text())
    (tmp_path / "records.json").write_text(json.dumps(recorded["rank 1 sleeps before an all_reduce of ranks 0 and 1"]))
    go, waits = tmp_path / "go", ("records", str(tmp_path / "records.json"), "faulthandler", "SIGUSR1")
    first = {
        "1": [*TRAINS, "sleep", 100],
        "2": ["await", str(go), 1, "raise", "OSError", "no such device"],
        "4": [*waits, *TRAINS[:3], 2, "sleep", 100],
        "8": [*TRAINS, "sleep", 100],
    }
    other = {
        "1": ["sleep", 0.5, "raise", "RuntimeError", "the cable is loose"],
        "2": ["line", "begun", "sleep", 100],
        "4": [*waits, "sleep", 100],
        "8": ["sleep", 100],
    }
    flags = ["--sweep", "micro_batch_size=1,2,4,8", "--set", "benchmarking.hang_minimum_seconds=3"]
    flags += ["--set", "benchmarking.hang_factor=2"]
    launchers = node(0, first, flags=flags), node(1, other, flags=flags)
    wait_for(lambda: any("begun" in path.read_text() for path in tmp_path.glob("out/runs/*/node-1/training.log")))
    go.write_text("\n")
    wait_for(lambda: len(list(tmp_path.glob("out/runs/*/node-1/training.log"))) == 4)
    launchers[1].send_signal(signal.SIGTERM)
    (status, said), (other_status, other_said) = ends(*launchers)
    assert (status, other_status) == (1, 143), said + other_said
    runs = {read_plan(path / "plan.json").workload.micro_batch_sequences: path for path in (tmp_path / "out" / "runs").iterdir()}
    records = {size: RunDirectory(path).read_run() for size, path in runs.items()}
    assert records[1].cause == f"Node 1 ({socket.gethostname()}): RuntimeError: the cable is loose"
    assert len(RunDirectory(runs[1]).read_steps()) == 4
    assert (records[2].outcome, records[2].cause) == ("failed", "OSError: no such device")
    assert "stopped after" in other_said
    assert records[4].outcome == "hung"
    assert "Rank 1 has not entered all_reduce number 2 of the group of ranks 0 and 1, in which rank 0 waits." in records[4].cause
    assert (runs[4] / "node-1" / "flight-recorder" / "rank-1.json").exists()
    assert "fake_trainer.py" in (runs[4] / "node-1" / "stacks.txt").read_text()
    assert records[8].outcome == "interrupted"
    assert records[8].cause == f"Node 1 ({socket.gethostname()}): Stopped by SIGTERM."
    assert not left_behind()


def test_a_signal_to_the_first_launcher_ends_the_run_on_both(node, tmp_path, left_behind):
    launchers = [node(0, "pace", 0.02, "steps", 2, "sleep", 100), node(1, "sleep", 100)]
    wait_for(lambda: list(tmp_path.glob("out/runs/*/steps.jsonl")) and list(tmp_path.glob("out/runs/*/node-1/training.log")))
    launchers[0].send_signal(signal.SIGINT)
    began = time.monotonic()
    ends(*launchers)
    record = the_record(tmp_path)
    assert record.outcome == "interrupted"
    assert "SIGINT" in record.cause
    assert time.monotonic() - began < 30, "the grace period of the ranks, not a time limit of the run"
    assert not left_behind()


def test_nodes_with_different_programs_do_not_start(node, tmp_path):
    launchers = [node(0, *TRAINS), node(1, *TRAINS, FAKE_VERSION="0.0.1")]
    for status, text in ends(*launchers):
        assert status == 2
        assert "The nodes have different software: tprimat" in text
    assert not (tmp_path / "out" / "runs").exists()


# The meeting itself, without launchers.


def hello(rank, **node):
    return Hello(node=NodeRecord(**{"host": f"gpu{rank}", "accelerator": None, "gpus": None, **node}), software={"torch": "2"})


@pytest.fixture
def place():
    return Nodes(count=2, rank=0, master_address="127.0.0.1", master_port=free_port(), job="7", hosts=("gpu0", "gpu1"))


def test_strangers_and_nodes_of_other_runs_do_not_take_a_place(place):
    group = NodeGroup(place, hello(0), 20)
    with socket.create_connection(("127.0.0.1", place.master_port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    right = Member(dataclasses.replace(place, rank=1), hello(1, host="right"))
    group.meet(lambda _: None)
    assert [node.host for node in group.records] == ["gpu0", "right"]
    twice = r"already joined[^\n]*\n.*\n.*, and 127.0.0.1 is this machine itself"
    for fields, reason in (({"job": "8"}, "no launcher of this run"), ({"count": 3}, "no launcher"), ({}, twice)):
        late = Member(dataclasses.replace(place, rank=1, **fields), hello(1))
        with pytest.raises(LaunchError, match=reason):
            late.join(3, lambda: False)
        late.close()
    assert (right.join(5, lambda: False), right.orders().stop) == (True, None)
    right.close()
    group.close()


def test_a_port_in_use_is_no_traceback(place):
    with socket.create_server(("127.0.0.1", place.master_port)), pytest.raises(LaunchError, match="cannot be used"):
        NodeGroup(place, hello(0), 1)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((("NVIDIA H200", 8), ("NVIDIA H100", 8)), "different accelerators: gpu0: 8 x NVIDIA H200; gpu1: 8 x NVIDIA H100"),
        ((("NVIDIA H200", 8), ("NVIDIA H200", 4)), "needs 8 GPUs on each node"),
        ((("NVIDIA H200", 8), (None, None)), "gpu1: no x cuda"),
    ],
)
def test_unlike_accelerators_are_refused(an_nvidia_plan, nodes, message):
    hellos = [hello(rank, accelerator=name, gpus=gpus) for rank, (name, gpus) in enumerate(nodes)]
    with pytest.raises(LaunchError, match=message):
        refuse_unlike(hellos, an_nvidia_plan)
    refuse_unlike([hellos[0]] * 2, an_nvidia_plan)


@pytest.fixture
def an_nvidia_plan(tmp_path):
    from tprimat.runner.request import RunRequest
    from tprimat.runner.session import prepare

    request = RunRequest(model="llama", platform="nvidia", gpus=8, nodes=2, size="full", dry_run=True, output=tmp_path)
    return prepare(request).plans[0]


def test_a_signal_to_all_nodes_is_the_cause_also_where_another_node_had_it_first(tmp_path):
    stopped = Failure(outcome="failed", cause="Node 1 (b) was lost: its launcher ended.")
    there = {"Node 1 (b)": Ending(exit_code=None, stopped=Failure(outcome="interrupted", cause="Stopped by SIGUSR1."))}

    def cause(first, elsewhere):
        launch = a_launch(tmp_path, group=SimpleNamespace(ends=lambda: elsewhere))
        attempt = Attempt(launch, Notes(), SimpleNamespace(first=first))
        return attempt._cause(Ending(exit_code=-15, stopped=stopped), stopped).cause

    assert cause(signal.SIGUSR1, there) == "Stopped by SIGUSR1."
    assert cause(None, there) == "Node 1 (b): Stopped by SIGUSR1."
    assert cause(None, {}) == stopped.cause


TORCHRUN = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:{second:02}
  rank      : {rank} (local_rank: 0)
  exitcode  : 1 (pid: 7)
============================================================"""


def test_a_cause_comes_before_its_consequences_and_an_earlier_one_before_a_later_one():
    def failed(rank, second, text):
        lines = [text, *TORCHRUN.format(second=second, rank=rank).splitlines()]
        return classify(1, lines, ()), lines

    echo = failed(0, 3, "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234")
    cause = failed(1, 5, "[rank1]: ValueError: a wrong shape")
    assert earliest([echo, cause]) == cause[0], "whatever the clocks of the nodes say"
    other = failed(0, 4, "[rank0]: KeyError: 'loss'")
    assert earliest([cause, other]) == earliest([other, cause]) == other[0]


def test_two_launchers_train_one_model(tmp_path, cookie, left_behind):
    """Real torchrun, gloo and Megatron-Core, one rank on each node."""
    del cookie
    command = [ROOT / "benchmark.py", "--nodes", "2", "--gpus", "1", "--platform", "cpu", "--model", "llama", "--steps", "2"]
    command += ["--micro-batch-size", "1", "--global-batch-size", "2", "--sequence-length", "32", "--output-dir", "out"]
    place = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    launchers = [Fork(command, tmp_path / str(rank), cwd=tmp_path, env={**place, "NODE_RANK": str(rank)}) for rank in (0, 1)]
    (status, text), (other_status, other_text) = ends(*launchers)
    assert (status, other_status) == (0, 0), text + other_text
    record = the_record(tmp_path)
    assert (record.counts, record.evidence.workload.data_parallel) == (True, 2)
    assert json.loads((tmp_path / "out" / "benchmark_cpu_llama.json").read_text())["run"]["run_id"] == record.run_id
    assert not left_behind()
