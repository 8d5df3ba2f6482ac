"""The command ./benchmark.py --sweep: combinations, constraints, order, and what a second call makes. Ranks are fake trainers."""

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import pytest
from commands import ROOT, fake_nvml, run_command
from hypothesis import given
from hypothesis import strategies as st

from tprimat.core.errors import ConfigError, LaunchError
from tprimat.engines.base import Command
from tprimat.hardware.gpus import users_of, visible_gpus
from tprimat.records.store import RunDirectory
from tprimat.runner import run as training
from tprimat.runner import sweep as engine
from tprimat.runner.grid import combinations, holds, parse_sweep
from tprimat.runner.request import RunRequest, with_values
from tprimat.runner.session import prepare
from tprimat.runner.sweep import Cell, differs_here, interleaved, is_result

TRAINER = (sys.executable, "-S", str(ROOT / "tests" / "fake_trainer.py"))


def chosen(*words, **fixed):
    return [tuple(one.values()) for one in combinations(parse_sweep(words), fixed)]


def test_every_combination_that_meets_the_constraints_in_the_order_of_the_values():
    assert chosen("tp=1,2,4", "pp=1,2") == list(itertools.product("124", "12"))
    assert chosen("tp=1,2,4", "pp=1,2", "tp*pp<=4", "pp==1 or tp > 1") == [("1", "1"), ("2", "1"), ("2", "2"), ("4", "1")]
    assert chosen("tp=1,2,4", "gpus % (tp*pp) == 0", gpus=2) == [("1",), ("2",)]
    assert chosen("training.optimizer.learning_rate=1e-4,3e-4", "parallel=balanced") == [
        ("1e-4", "balanced"),
        ("3e-4", "balanced"),
    ]


def test_a_file_lists_cells_or_spans_a_grid(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "list: [{tp: 1, pp: 2}, {tp: 2, pp: 1}, {tp: 4, pp: 4}]\ngrid: {micro_batch_size: [1, 2]}\nwhere: ['tp*pp<=2']\n"
    )
    assert chosen(str(path)) == [("1", "2", "1"), ("1", "2", "2"), ("2", "1", "1"), ("2", "1", "2")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tpp=1,2"], "cannot vary 'tpp'"),
        (["tp="], "--sweep tp has no values"),
        (["tp=1,2", "tp>9"], "no combination that meets"),
        (["tp=1", "__import__('os').system('true')==0"], "Call has no place"),
        (["tp=1", "tp.__class__ == 1"], "Attribute has no place"),
        (["tp=1", "zz<2"], "zz is not varied here"),
        (["tp=1", "2**10**9 > 1"], "cannot be evaluated"),
        (["steps=" + ",".join(map(str, range(200))), "seed=" + ",".join(map(str, range(200)))], "more than 10,000"),
        (["no_such_file.yaml"], "no_such_file.yaml"),
    ],
)
def test_what_is_no_sweep_is_explained(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        combinations(parse_sweep(words))
    assert message in str(error.value)


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 9))
def test_a_constraint_means_what_python_means(a, b, c):
    for text in ("a*b<=c", "a+b-c != 0", "a//c == b or b%c < a", "a < b <= c", "a/c >= b and a > 0"):
        assert holds(text, {"a": a, "b": b, "c": c}) == bool(eval(text))


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
    found = [cell.plan.strategy[0] for cell in interleaved(cells)]
    assert "".join(found) == "mbbmmb"
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


def test_a_run_that_was_cut_off_is_a_result_where_its_plan_never_completes(session):
    plan = session.plans[0]
    first = training._starting(plan, session.machine_of(plan), (training.this_node(plan),))
    cut_off = dataclasses.replace(first, outcome="timed_out", cut_off=True)
    slow = dataclasses.replace(cut_off, cut_off=False)
    completed = dataclasses.replace(first, outcome="completed")
    other = next(one for one in session.plans if one.strategy != plan.strategy)
    assert is_result(slow, plan, [(plan, slow)])
    assert not is_result(cut_off, plan, [(plan, cut_off), (other, cut_off)])
    assert is_result(cut_off, plan, [(plan, cut_off), (plan, cut_off)])
    assert not is_result(cut_off, plan, [(plan, completed), (plan, cut_off), (plan, cut_off)])


def test_a_program_on_a_gpu_is_waited_for_and_then_named(session, monkeypatch):
    monkeypatch.setattr(engine, "FREE_WITHIN_SECONDS", 0.1)
    plan = dataclasses.replace(session.plans[0], platform="nvidia")
    with fake_nvml():
        monkeypatch.setenv("FAKE_GPUS", json.dumps([{"processes": [[7, 1 << 20]]}, {"processes": [[42, 34 << 30]]}, {}]))
        assert [(user.gpu, user.pid) for user in users_of(visible_gpus({}))] == [(1, 42)], "an idle process is none"
        notices = []
        with pytest.raises(LaunchError, match=r"In use: GPU 1 by process 42 \(34\.0 GiB\)"):
            engine.wait_until_free(plan, notices.append)
        assert notices == ["waiting for GPUs in use: GPU 1 by process 42 (34.0 GiB)"]
        engine.wait_until_free(dataclasses.replace(plan, gpus_per_node=1), notices.append)


# The command.


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Starts the fake trainer instead of torchrun; what it does after its steps, by strategy. `started` lists the runs."""
    last = {"started": []}

    def command_on(plan, place):
        del place
        last["started"].append(plan.strategy)
        environment = {"FAKE_STEPS": f"{plan.run_directory}/steps.jsonl", "FAKE_TOKENS": str(plan.workload.tokens_per_step)}
        words = last.get(plan.strategy, ())
        words = words.pop(0) if isinstance(words, list) else words
        return Command(argv=(*TRAINER, "pace", "0.002", "steps", str(plan.steps), *words), environment=environment)

    monkeypatch.setattr(training, "command_on", command_on)
    monkeypatch.chdir(tmp_path)
    return last


def sweep(folder, *flags):
    words = ["--model", "llama", "--platform", "cpu", "--gpus", 2, "--steps", 12, "--output-dir", folder / "out"]
    return run_command("benchmark.py", *words, *flags, cwd=folder)


GRID = ("--sweep", "tp=1,2,3", "--sweep", "pp=1,2", "--sweep", "tp*pp<=3")


def test_a_sweep_says_what_is_invalid_ranks_the_rest_and_draws_it(trainer, tmp_path):
    done = sweep(tmp_path, *GRID, "--runs", 2)
    assert done.returncode == 0, done.stderr
    assert "llama tp=3 pp=1: cannot run here. num_attention_heads (32)" in done.stderr.split("waits")[0]
    assert trainer["started"] == ["tp1_pp1", "tp1_pp2", "tp2_pp1", "tp2_pp1", "tp1_pp2", "tp1_pp1"]
    assert "5 of 6 done, " in done.stderr
    assert "tp=1 pp=2" in done.stdout
    (refused,) = (line.split() for line in done.stdout.splitlines() if "cannot run here" in line)
    assert refused[:4] == ["tp=3", "pp=1", "llama", "tp3_pp1"], "refused and completed cells are named alike"
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    again = sweep(tmp_path, *GRID, "--runs", 2)
    assert (again.returncode, len(trainer["started"]), again.stderr.count("skipped, run")) == (0, 6, 6)


def test_a_sweep_of_which_nothing_can_run_says_each_reason_once(trainer, tmp_path):
    done = sweep(tmp_path, "--sweep", "tp=3,7")
    assert (done.returncode, trainer["started"]) == (2, [])
    assert [done.stderr.count(f"must be a multiple of --tp ({degree}).") for degree in (3, 7)] == [1, 1]
    assert "error: None of the 2 combinations can run here." in done.stderr


def test_failures_are_results_until_they_are_asked_for_again(trainer, tmp_path):
    trainer["tp2"] = [("exit", "3"), ()]
    first = sweep(tmp_path, "--sweep", "tp=1,2")
    assert (first.returncode, trainer["started"]) == (1, ["tp1", "tp2"])
    second = sweep(tmp_path, "--sweep", "tp=1,2")
    assert (second.returncode, len(trainer["started"])) == (1, 2)
    assert "ended: failed. --resume repeats it." in second.stderr
    third = sweep(tmp_path, "--sweep", "tp=1,2", "--resume")
    assert (third.returncode, trainer["started"]) == (0, ["tp1", "tp2", "tp2"])


def test_a_cause_that_may_be_gone_is_tried_once_more(trainer, tmp_path):
    trainer["tp1"] = [("line", "RendezvousTimeoutError: nobody came", "exit", "1"), ()]
    done = sweep(tmp_path, "--sweep", "tp=1")
    assert (done.returncode, trainer["started"]) == (0, ["tp1", "tp1"])
    assert "did not find each other. Once more." in done.stderr
    outcomes = [RunDirectory(path.parent).read_run().outcome for path in sorted((tmp_path / "out").glob("runs/*/run.json"))]
    assert outcomes == ["timed_out", "completed"]


def test_the_benchmark_file_is_that_of_the_run_that_counts(trainer, tmp_path):
    flags = ("--parallel", "minimal_communication")
    assert sweep(tmp_path, *flags).returncode == 0
    assert sweep(tmp_path, "--parallel", "balanced").returncode == 0
    assert sweep(tmp_path, *flags, "--resume").returncode == 0
    document = json.loads(Path(tmp_path / "out" / "benchmark_cpu_llama.json").read_text())
    assert document["run"]["strategy"] == "minimal_communication"
    assert len(trainer["started"]) == 2
