"""BenchmarkCallback on users' own Trainers: accumulate, validate, resume, return anything, run out of disk, be killed."""

import csv
import importlib
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path

import pytest
import pytorch_lightning as lightning
import torch
from commands import run_command
from planning import LIGHTLY, make_plan

from tprimat.core.errors import ConfigError, RecordError
from tprimat.hardware.nodes import Nodes
from tprimat.launch.process import torchrun
from tprimat.records.discover import load_results
from tprimat.records.store import RunDirectory
from tprimat.train.rank import AnyTrainer, describe_machine, launched_record, this_node
from utils import BenchmarkCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
ROOT = Path(__file__).parent.parent.parent
VALIDATION, SLOW_VALIDATION = 0.5, 4.0
"""Seconds. On a busy machine a step of two ranks has taken 2.3."""
LATE = 100.0
"""Seconds between the record's start and training."""
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def line_of(package):
    class Line(package.LightningModule):
        """Returns from each training step what `outputs(loss, index)` makes of it."""

        def __init__(self, outputs=lambda loss, index: loss):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.outputs = outputs

        def training_step(self, batch, index):
            return self.outputs(self.layer(batch).square().mean(), index)

        def validation_step(self, batch, index):
            time.sleep(VALIDATION)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Line


Line = line_of(lightning)


def rows(batches, loader=torch.utils.data.DataLoader):
    return loader(torch.ones(batches * 2, 4), batch_size=2)


def train(callback, outputs=lambda loss, index: loss, *, batches=6, validation=None, package=lightning, **options):
    trainer = package.Trainer(accelerator="cpu", callbacks=[callback], **{"max_epochs": 1, **QUIET, **options})
    trainer.fit(line_of(package)(outputs), rows(batches), validation)
    return trainer


def only_result(folder):
    results, problems = load_results([folder])
    assert not problems
    return results[0]


def counts(folder):
    """Whether the analyses count the run."""
    done = run_command("export", "--results-dir", folder, "--to", "csv", folder / "runs.csv")
    assert done.returncode == 0, done.stderr
    with (folder / "runs.csv").open() as file:
        (row,) = csv.DictReader(file)
    return row["counted"] == "True"


@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning.pytorch"])
def test_any_trainer_is_measured_under_both_names_and_the_tools_read_its_folder(tmp_path, monkeypatch, name):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    callback = BenchmarkCallback(tmp_path / "mine", tokens_per_step=64)
    train(callback, lambda loss, index: {"loss": loss, "grad_norm": 3.5}, package=importlib.import_module(name))
    result = only_result(tmp_path / "mine")
    assert [step.step for step in result.steps] == [*range(1, (result.run.steps_recorded or 0) + 1)] == [1, 2, 3, 4, 5, 6]
    assert {(step.tokens, step.learning_rate, step.grad_norm) for step in result.steps} == {(64, 0.01, 3.5)}
    assert all(step.step_seconds > 0 and step.finite and step.loss is not None for step in result.steps)
    assert all(1e7 < step.peak_allocated_bytes < 1e12 for step in result.steps)  # what the process holds in memory
    assert {step.peak_reserved_bytes for step in result.steps} == {None}
    ends = [step.ended_at_seconds for step in result.steps]
    assert ends[0] > 0
    assert ends == sorted(ends)
    assert result.run.environment["NCCL_P2P_DISABLE"] == "1"
    (node,) = result.run.nodes
    assert (node.processor, node.cores) == (result.run.machine.accelerator, len(os.sched_getaffinity(0)))
    assert (result.run.run_id, result.run.model, result.run.outcome) == ("mine", "Line", "completed")


def test_each_step_says_when_it_ended_since_the_run_was_started(tmp_path):
    started_at = (datetime.now(timezone.utc) - timedelta(seconds=LATE)).isoformat(timespec="milliseconds")
    described = AnyTrainer("r").describe
    began = time.time()
    train(
        BenchmarkCallback(tmp_path, describe=lambda trainer, module: replace(described(trainer, module), started_at=started_at))
    )
    steps = RunDirectory(tmp_path).read_steps()
    ends = [step.ended_at_seconds for step in steps]
    assert LATE < ends[0] < ends[-1] < LATE + time.time() - began + 0.01
    assert [end - before for before, end in pairwise(ends)] == pytest.approx([step.step_seconds for step in steps[1:]])


KILLED = """
import os, signal, sys
sys.path[:0] = ["tests", "tests/train"]
from test_callback import BenchmarkCallback, train
def outputs(loss, index):
    if index == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss
train(BenchmarkCallback("FOLDER"), outputs, batches=8)
"""


def test_a_kill_loses_the_running_step_and_no_other(tmp_path):
    code = LIGHTLY + KILLED.replace("FOLDER", str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    assert [step.step for step in RunDirectory(tmp_path).read_steps()] == [1, 2, 3, 4, 5]


def test_a_step_has_the_mean_loss_and_all_tokens_of_its_batches(tmp_path):
    def outputs(loss, index):
        return {"loss": 0 * loss + index, "tokens": 10}

    train(BenchmarkCallback(tmp_path / "told"), outputs, batches=5, accumulate_grad_batches=2)
    steps = RunDirectory(tmp_path / "told").read_steps()
    assert [(step.loss, step.tokens) for step in steps] == [(0.5, 20), (2.5, 20), (4.0, 10)]


def test_tokens_of_a_step_are_a_whole_number():
    for tokens in ("64", 64.5, -3, 0):
        with pytest.raises(ConfigError, match="tokens_per_step is"):
            BenchmarkCallback("/nowhere", tokens_per_step=tokens)


class SlowToStart(torch.utils.data.DataLoader):
    def __iter__(self):
        time.sleep(VALIDATION)
        return super().__iter__()


def test_validation_and_the_start_of_its_loader_are_no_part_of_a_step(tmp_path):
    options = {"val_check_interval": 3, "num_sanity_val_steps": 0, "accumulate_grad_batches": 2}
    train(BenchmarkCallback(tmp_path), validation=rows(1, SlowToStart), max_epochs=2, **options)
    steps = RunDirectory(tmp_path).read_steps()
    assert max(step.step_seconds for step in steps[1:]) < VALIDATION  # the first step also starts torch
    assert len(steps) == 6
    assert counts(tmp_path)


ENDS = [
    (ValueError("no such row\nin the table"), "failed", "ValueError: no such row"),
    (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
    (torch.OutOfMemoryError("no room"), "out_of_memory", "OutOfMemoryError: no room"),
]


@pytest.mark.parametrize(("error", "outcome", "cause"), ENDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_run_that_ends_early_says_how(tmp_path, error, outcome, cause):
    def outputs(loss, index):
        if index == 3:
            raise error
        return loss

    with pytest.raises((type(error), SystemExit)):
        train(BenchmarkCallback(tmp_path), outputs)
    run, steps = RunDirectory(tmp_path).read_whole()
    assert (run.outcome, run.cause, len(steps)) == (outcome, cause, 3)
    assert run.ended_at is not None


def test_a_folder_with_the_steps_of_a_run_is_refused(tmp_path):
    train(BenchmarkCallback(tmp_path), batches=2)
    with pytest.raises(RecordError, match="already holds the steps of a run"):
        train(BenchmarkCallback(tmp_path), batches=2)
    run, steps = RunDirectory(tmp_path).read_whole()
    assert (run.outcome, len(steps)) == ("completed", 2)


STRANGE = {"tokens": torch.ones(2, 4), "grad_norm": "large", "dropped": 17, "learning_rate": [0.1], "rank_load": float("inf")}


def test_outputs_that_are_no_numbers_break_neither_training_nor_the_file(tmp_path):
    train(BenchmarkCallback(tmp_path / "a", tokens_per_step=64), lambda loss, index: {"loss": loss, **STRANGE}, batches=2)
    (step, _) = only_result(tmp_path / "a").steps
    assert [getattr(step, name) for name in STRANGE] == [64, None, None, 0.01, None]
    train(BenchmarkCallback(tmp_path / "b"), lambda loss, index: loss * float("nan"), batches=2)
    steps = only_result(tmp_path / "b").steps
    assert [(step.loss, step.finite, step.tokens) for step in steps] == [(None, False, None)] * 2


def test_training_goes_on_when_steps_can_no_longer_be_written(tmp_path):
    folder = tmp_path / "run"

    def outputs(loss, index):
        if index == 3:
            shutil.rmtree(folder)
        return loss

    with pytest.warns(UserWarning, match="Training continues") as warned:
        trainer = train(BenchmarkCallback(folder), outputs)
    assert trainer.global_step == 6
    assert sum("Training continues" in str(warning.message) for warning in warned) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="Not a directory"):
        train(BenchmarkCallback(tmp_path / "file" / "run"))


class Manual(Line):
    """Steps its optimizer itself, returns no loss, and logs what a test gives it."""

    automatic_optimization = False

    def __init__(self, log):
        super().__init__()
        self.log_step = log

    def training_step(self, batch, index):
        self.manual_backward(self.layer(batch).square().mean())
        self.optimizers().step()
        self.log_step(self, index)

    def validation_step(self, batch, index):
        self.log("loss", 99.0)


def fit_manual(callbacks, log, **options):
    lightning.Trainer(accelerator="cpu", callbacks=callbacks, **QUIET, **options).fit(Manual(log), rows(3), rows(1))


def test_a_step_has_only_what_the_module_logged_in_it(tmp_path):
    def log(module, index):
        module.log("train_loss", float(index), on_step=False, on_epoch=True)
        if index == 1:
            module.log("grad_norm", 7.0)

    fit_manual([BenchmarkCallback(tmp_path)], log, max_epochs=2)
    steps = RunDirectory(tmp_path).read_steps()
    assert [(step.loss, step.grad_norm) for step in steps] == [(None, None), (None, 7.0), (None, None)] * 2


TWO_RANKS = """
import sys, time, torch, pytorch_lightning as lightning
from pathlib import Path
sys.path[:0] = ["tests", "tests/train"]
from test_callback import SLOW_VALIDATION, Line, rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from utils import BenchmarkCallback

class Unequal(Line):
    def training_step(self, batch, index):
        norm = DTensor.from_local(torch.tensor(1.0 + self.global_rank), init_device_mesh("cpu", (2,)), [Partial()])
        return {"loss": super().training_step(batch, index), "grad_norm": norm}

    def validation_step(self, batch, index):
        time.sleep(SLOW_VALIDATION * self.global_rank)

def trainer(folder, **options):
    callback = BenchmarkCallback(Path(sys.argv[1], folder))
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    options = dict(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=[callback], **options)
    return lightning.Trainer(**options, **quiet)

trainer("unequal", val_check_interval=2, num_sanity_val_steps=0).fit(Unequal(), rows(8), rows(1))
for attempt in range(2):
    try:
        trainer("refused").fit(Line(), rows(6))
    except Exception as error:
        print("attempt", attempt, str(error).splitlines()[0])
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two ranks leave and print: unequal ones first, and then two trainings into one folder, of which it refuses one."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    joined = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LIGHTLY + TWO_RANKS, str(folder)],
            cwd=ROOT,
            env={**joined, "NODE_RANK": "0", "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return folder, [rank.communicate(timeout=300)[0] for rank in ranks]


@pytest.mark.slow
def test_each_of_two_ranks_hears_that_the_folder_is_refused(two_ranks):
    folder, outputs = two_ranks
    refused = f"attempt 1 {folder / 'refused'} already holds the steps of a run."
    assert [[line for line in output.splitlines() if line.startswith("attempt")] for output in outputs] == [[refused]] * 2
    run, steps = RunDirectory(folder / "refused").read_whole()
    assert (run.machine.gpus, [step.step for step in steps]) == (2, [1, 2, 3])


@pytest.mark.slow
def test_a_step_counts_the_ranks_together_where_they_differ(two_ranks):
    steps = RunDirectory(two_ranks[0] / "unequal").read_steps()
    assert [step.grad_norm for step in steps] == [3.0] * 4  # a sum that each rank holds a part of
    assert max(step.step_seconds for step in steps[1:]) < SLOW_VALIDATION  # without the validation of the slower rank


WORKLOAD = """
from tprimat.core.models import model_shape, tiny
from tprimat.core.workload import FullWorkload, Layout
from tprimat.megatron import train
shape = tiny(model_shape("qwen-2.5-0.5b"))
train(FullWorkload.of(Layout(), micro_batch=1, accumulation_steps=2, shape=shape, sequence_tokens=32), steps=2)
"""


@pytest.mark.slow
def test_a_workload_trains_without_a_configuration(tmp_path):
    (tmp_path / "own.py").write_text(WORKLOAD)
    command = [*torchrun(Nodes(), 1), "own.py"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    run, steps = RunDirectory(tmp_path / "tprimat-run").read_whole()
    assert (run.outcome, run.mismatches, [step.step for step in steps]) == ("completed", (), [1, 2])


def test_a_run_on_one_node_has_one_accelerator_in_whatever_order_the_driver_counts_them(tmp_path):
    plan = make_plan(tmp_path, "llama", {})
    machine = replace(describe_machine(1, 2), accelerator="NVIDIA GeForce RTX 3090")
    node = replace(this_node(machine), processor="kept")
    RunDirectory(tmp_path).write_run(plan.begun_on(machine, nodes=(node,)))
    record = launched_record(plan)
    assert record.nodes == (replace(node, accelerator=record.machine.accelerator),)
