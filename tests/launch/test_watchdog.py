import dataclasses
import json
import os
import re
import time

import pytest
from a_launch import ROOT, Notes, a_launch, leftovers
from planning import make_plan

from tprimat.hardware.nodes import Nodes
from tprimat.launch import process
from tprimat.launch.hang import Stack, culprit
from tprimat.launch.process import torchrun
from tprimat.launch.run import Watchdog, run
from tprimat.plan.schema import BenchmarkingConfig, write_plan


def test_a_run_that_takes_too_long_is_stopped_and_keeps_its_steps(tmp_path, left_behind, monkeypatch):
    late = []
    monkeypatch.setattr(process, "monotonic", lambda: time.monotonic() + 1000.0 * len(late))
    notes = Notes()
    notes.on_step = lambda step: late.append(1) if step.step == 3 else None
    launch = a_launch(tmp_path, "pace", 0.01, "steps", 1000, limits={"run_timeout_seconds": 900.0}, planned_steps=1000)
    record, steps = run(launch, notes)
    assert record.outcome == "timed_out"
    last = re.search(r"the last was step (\d+) of 1000", record.cause)
    assert 3 <= int(last[1]) <= steps[-1].step < 1000  # a step may end while the run is being stopped
    assert not left_behind()


HANGS = {"hang_factor": 3.0, "hang_minimum_seconds": 0.5}


TRAINER = """
import time
from pathlib import Path
import torch
import torch.distributed as dist

def load_batch():
    time.sleep(600)

def train(plan):
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1], group_desc="PAIR")
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=pair)
    if dist.get_rank() == 1:
        load_batch()
    with open(Path(plan.run_directory) / "steps.jsonl", "a") as file:
        file.write('{"step": 1, "step_seconds": 0.1}\\n')
    dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=pair)
"""


def test_the_rank_that_the_others_wait_for_is_named_with_the_collective_that_it_has_not_entered(
    tmp_path, left_behind, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    (tmp_path / "hangs.py").write_text(TRAINER)
    plain = a_launch(tmp_path / "run", limits={"hang_factor": 3.0, "hang_minimum_seconds": 2.0})
    write_plan(tmp_path / "plan.json", dataclasses.replace(make_plan(tmp_path / "run", "llama", {}), trainer="hangs"))
    argv = (*torchrun(Nodes(), 2), "-m", "tprimat.train.worker", "--plan", str(tmp_path / "plan.json"))
    record, _ = run(dataclasses.replace(plain, command=dataclasses.replace(plain.command, argv=argv)), Notes())
    assert record.outcome == "hung"
    assert "Rank 1 is in load_batch (hangs.py:8), where no other rank is." in record.cause
    assert record.cause.endswith("Rank 1 has not entered all_gather number 4 of group PAIR, in which rank 0 waits.")
    stacks = (tmp_path / "run" / "stacks.txt").read_text()
    assert re.search(r"Rank 0, process \d+: stack\n(.|\n)*in all_gather", stacks), stacks
    recorded = [json.loads(path.read_text()) for path in sorted((tmp_path / "run" / "flight-recorder").iterdir())]
    assert [document["rank"] for document in recorded] == [0, 1]
    assert not left_behind()
    assert not leftovers()


def test_a_rank_that_is_stopped_is_named(tmp_path, left_behind):
    plain = a_launch(tmp_path, "steps", 3, "kill", "SIGSTOP", limits=HANGS)
    environment = {**plain.command.environment, "RANK": "5", "LOCAL_RANK": "1"}
    launch = dataclasses.replace(plain, command=dataclasses.replace(plain.command, environment=environment), grace_seconds=0.5)
    record, _ = run(launch, Notes())
    assert record.outcome == "hung"
    assert re.search(r"Rank 5 \(process \d+\) is stopped \(SIGSTOP\)\.$", record.cause), record.cause
    assert not left_behind()


def at(rank, function, file="model.py", **fields):
    text = f'Current thread 0x7f (most recent call first):\n  File "{file}", line 7 in {function}\n'
    return Stack(**{"pid": 100 + rank, "rank": rank, "state": "S", "text": text, **fields})


C10D = "/x/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("stacks", "named"),
    [
        ([at(0, "barrier", C10D), at(1, "barrier", C10D)], None),
        ([at(0, "barrier", C10D), at(1, "read"), at(2, "all_reduce", C10D)], "Rank 1 is in read (model.py:7)"),
        ([at(0, "wait"), at(1, "read")], None),  # either may wait for the other
        ([at(0, "wait"), at(1, "read"), at(2, "write")], None),
        ([at(0, "barrier", C10D), at(1, "", text="")], None),  # a rank that says nothing may be it
        ([at(0, "barrier", C10D), at(1, "", text="", state="D")], "Rank 1 (process 101) waits in the kernel"),
    ],
)
def test_a_rank_is_named_only_where_the_stacks_show_it(stacks, named):
    told = culprit(stacks)
    assert (told is None) if named is None else told.startswith(named), told


def watchdog(**limits):
    given = {"startup_timeout_seconds": 100.0, "hang_factor": 10.0, "hang_minimum_seconds": 5.0, **limits}
    return Watchdog(BenchmarkingConfig(**given), started=0.0)


def test_the_first_step_slow_steps_and_reports_of_every_tenth_are_given_more_time():
    assert watchdog().verdict(99.0) is None
    assert watchdog().verdict(101.0).outcome == "timed_out"
    dog = watchdog()
    for step in range(1, 4):
        dog.saw_step(step, 2.0, now=2.0 * step)
        dog.verdict(2.0 * step)
    assert dog.verdict(25.9) is None
    assert dog.verdict(26.1).outcome == "hung"
    dog = watchdog()
    for report in range(1, 4):
        dog.saw_step(10 * report, 1.0, now=10.0 * report)
    assert dog.verdict(90.0) is None


def test_a_run_that_was_stopped_for_its_silence_shows_what_its_log_says(tmp_path):
    words = ("line", "ProcessGroupNCCL's watchdog got stuck for 480 seconds", "steps", 1, "sleep", 100)
    record, _ = run(a_launch(tmp_path, *words, limits=HANGS), Notes())
    assert record.outcome == "hung"
    assert "The log says: ProcessGroupNCCL's watchdog got stuck" in record.cause
