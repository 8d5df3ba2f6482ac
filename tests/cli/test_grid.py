"""The command ./benchmark.py --sweep: combinations, constraints, order, and what a second call makes. Ranks are fake trainers."""

import dataclasses
import json

import pytest
from commands import fake_nvml, run_command

from tprimat.core.errors import ConfigError, LaunchError
from tprimat.hardware.gpus import users_of, visible_gpus
from tprimat.runner import run as training
from tprimat.runner import schedule as engine
from tprimat.runner.cells import Cell
from tprimat.runner.request import RunRequest, sweep_requests, with_values
from tprimat.runner.schedule import differs_here, interleaved, is_result
from tprimat.runner.session import prepare


def chosen(*words):
    return [label for label, _ in sweep_requests(RunRequest(), words)]


def test_every_combination_in_the_order_of_the_values():
    assert chosen("tp=1,2", "pp=1,2") == ["tp=1 pp=1", "tp=1 pp=2", "tp=2 pp=1", "tp=2 pp=2"]
    assert chosen("training.optimizer.learning_rate=1e-4, 3e-4,1e-4", "parallel=balanced") == [
        "learning_rate=1e-4 parallel=balanced",
        "learning_rate=3e-4 parallel=balanced",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tpp=1,2"], "cannot vary 'tpp'"),
        (["tp="], "--sweep tp= is not KEY=VALUE,VALUE"),
        (["tp<=8"], "cannot vary 'tp<'"),
        (["steps=" + ",".join(map(str, range(200))), "seed=" + ",".join(map(str, range(200)))], "asks for 40,000 runs"),
    ],
)
def test_what_is_no_sweep_is_explained(words, message):
    with pytest.raises(ConfigError) as error:
        chosen(*words)
    assert message in str(error.value)


def test_a_swept_degree_replaces_the_strategy_and_other_keys_become_settings():
    chosen = {"tp": "2", "experiment.seed": "7", "micro_batch_size": "2"}
    request = with_values(RunRequest(strategy="balanced"), chosen.items(), "--sweep")
    assert (request.tp, request.strategy, request.micro_batch_size, request.settings) == (2, None, "2", ("experiment.seed=7",))
    with pytest.raises(ConfigError, match="It takes a whole number"):
        with_values(RunRequest(), {"tp": "two"}.items(), "--sweep")


# The engine: order, and which earlier runs count.


@pytest.fixture
def session(tmp_path):
    request = RunRequest(
        model="llama", strategy="minimal_communication,balanced", runs=3, platform="cpu", gpus=2, output=tmp_path
    )
    return prepare(request)


def test_repetitions_are_interleaved_forth_and_back(session):
    cells = [Cell(session=session, plan=plan) for plan in session.plans]
    order = [cell.plan.strategy[0] for cell in interleaved(cells)]
    assert "".join(order) == "mbbmmb"
    assert {cell.plan.run_id for cell in interleaved(cells)} == {plan.run_id for plan in session.plans}


def test_a_run_on_another_machine_or_with_other_libraries_or_variables_does_not_count(session, monkeypatch):
    cell = Cell(session=session, plan=session.plans[0])
    record = training._starting(cell.plan, session.machine_of(cell.plan), (training.this_node(cell.plan),))
    assert differs_here(cell, record) is None
    torch = record.software["torch"]
    older = dataclasses.replace(record, software={**record.software, "torch": "2.6.0"})
    assert differs_here(cell, older) == f"torch 2.6.0 there, {torch} here"
    node = dataclasses.replace(record.nodes[0], accelerator="NVIDIA A100")
    assert "accelerator NVIDIA A100 there" in differs_here(cell, dataclasses.replace(record, nodes=(node,)))
    machine = dataclasses.replace(record.machine, driver="570")
    assert differs_here(cell, dataclasses.replace(record, machine=machine)) == "driver 570 there, none here"
    assert "unknown there" in differs_here(cell, dataclasses.replace(record, software={}))
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert differs_here(cell, record) == "NCCL_ALGO not set there, Ring here"
    assert differs_here(cell, dataclasses.replace(record, environment=None)) is None


def test_a_run_that_was_cut_off_is_no_result(session):
    plan = session.plans[0]
    first = training._starting(plan, session.machine_of(plan), (training.this_node(plan),))
    slow = dataclasses.replace(first, outcome="timed_out")
    assert is_result(slow)
    assert not is_result(dataclasses.replace(slow, cut_off=True))
    assert not is_result(dataclasses.replace(first, outcome="interrupted"))


def test_a_program_on_a_gpu_is_waited_for_and_then_named(session, monkeypatch, capsys):
    monkeypatch.setattr(engine, "FREE_WITHIN_SECONDS", 0.1)
    plan = dataclasses.replace(session.plans[0], platform="nvidia")
    with fake_nvml():
        monkeypatch.setenv("FAKE_GPUS", json.dumps([{"processes": [[7, 1 << 20]]}, {"processes": [[42, 34 << 30]]}, {}]))
        assert users_of(visible_gpus({})) == ["GPU 1 by process 42 (34.0 GiB)"], "an idle process is none"
        with pytest.raises(LaunchError, match=r"In use: GPU 1 by process 42 \(34\.0 GiB\)"):
            engine.wait_until_free(plan)
        assert capsys.readouterr().err == "waiting for GPUs in use: GPU 1 by process 42 (34.0 GiB)\n"
        engine.wait_until_free(dataclasses.replace(plan, gpus_per_node=1))


# The command.


def started(trainer):
    return [plan.strategy for plan in trainer["started"]]


def sweep(folder, *flags):
    words = ["--model", "llama", "--platform", "cpu", "--gpus", 2, "--steps", 12, "--output-dir", folder / "out"]
    return run_command("benchmark.py", *words, *flags, cwd=folder)


GRID = ("--sweep", "tp=1,2,3", "--sweep", "pp=1,2")


def test_a_sweep_says_what_is_invalid_ranks_the_rest_and_draws_it(trainer, tmp_path):
    done = sweep(tmp_path, *GRID, "--runs", 2)
    assert done.returncode == 0, done.stderr
    assert "llama tp=3 pp=1: cannot run here. num_attention_heads (32)" in done.stderr.split("waits")[0]
    assert started(trainer) == ["tp1_pp1", "tp1_pp2", "tp2_pp1", "tp2_pp1", "tp1_pp2", "tp1_pp1"]
    assert "5 of 6 done, " in done.stderr
    assert "tp=1 pp=2" in done.stdout
    assert [line.split()[:3] for line in done.stdout.splitlines() if "cannot run here" in line] == [
        [f"tp={tp}", f"pp={pp}", "llama"] for tp, pp in ((2, 2), (3, 1), (3, 2))
    ]
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    again = sweep(tmp_path, *GRID, "--runs", 2)
    assert (again.returncode, len(trainer["started"]), again.stderr.count("skipped, run")) == (0, 6, 6)


def test_a_sweep_of_which_nothing_can_run_says_each_reason_once(trainer, tmp_path):
    done = sweep(tmp_path, "--sweep", "tp=3,7")
    assert (done.returncode, trainer["started"]) == (2, [])
    assert [done.stderr.count(f"must be a multiple of tensor_model_parallel_size ({degree}).") for degree in (3, 7)] == [1, 1]
    assert done.stderr.count("  try   --tp 1 or 2\n") == 2, "what to type, of what two ranks allow"
    assert "error: None of the 2 runs can start here." in done.stderr


def test_failures_are_results_until_they_are_asked_for_again(trainer, tmp_path):
    trainer["tp2"] = [("exit", "3"), ()]
    first = sweep(tmp_path, "--sweep", "tp=1,2")
    assert (first.returncode, started(trainer)) == (1, ["tp1", "tp2"])
    second = sweep(tmp_path, "--sweep", "tp=1,2")
    assert (second.returncode, len(trainer["started"])) == (1, 2)
    assert "ended: failed. --resume repeats it." in second.stderr
    third = sweep(tmp_path, "--sweep", "tp=1,2", "--resume")
    assert (third.returncode, started(trainer)) == (0, ["tp1", "tp2", "tp2"])
