"""BenchmarkCallback on Trainers that are not ours, under both names of Lightning."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from planning import LIGHTLY

from tprimat.core.errors import RecordError
from tprimat.records.discover import load_results
from tprimat.records.store import RunDirectory
from utils import BenchmarkCallback

ROOT = Path(__file__).parent.parent.parent
NAMES = ("pytorch_lightning", "lightning.pytorch")


def plain_module(lightning, *, loss_factor=1.0):
    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            del index
            loss = self.layer(batch).pow(2).mean() * loss_factor
            return {"loss": loss, "grad_norm": 3.5}

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.125)

    return Regression()


def fit(lightning, callback, *, batches=6, loss_factor=1.0, **options):
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = torch.utils.data.DataLoader(torch.randn(batches * 2, 4), batch_size=2)
    trainer.fit(plain_module(lightning, loss_factor=loss_factor), data)


@pytest.mark.parametrize("name", NAMES)
def test_any_trainer_is_measured_under_both_names(tmp_path, name):
    fit(importlib.import_module(name), BenchmarkCallback(tmp_path, tokens_per_step=64))
    steps = RunDirectory(tmp_path).read_steps()
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    assert {step.tokens for step in steps} == {64}
    assert {step.learning_rate for step in steps} == {0.125}
    assert {step.grad_norm for step in steps} == {3.5}
    assert all(step.step_seconds > 0 and step.finite and step.loss is not None for step in steps)
    assert all(1e7 < step.peak_allocated_bytes < 1e12 for step in steps)  # on a CPU, what the process holds in memory
    assert {step.peak_reserved_bytes for step in steps} == {None}


def test_the_folder_of_any_trainer_can_be_read_by_the_tools(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    fit(importlib.import_module(NAMES[0]), BenchmarkCallback(tmp_path / "mine", tokens_per_step=64))
    (result,) = load_results([tmp_path / "mine"])[0]
    assert result.run.environment["NCCL_P2P_DISABLE"] == "1"
    (node,) = result.run.nodes
    assert (node.processor, node.cores) == (result.run.machine.accelerator, len(os.sched_getaffinity(0)))
    assert (result.run.run_id, result.run.model, result.run.outcome) == ("mine", "Regression", "completed")
    assert len(result.steps) == 6


def test_a_second_run_does_not_mix_with_the_first(tmp_path):
    lightning = importlib.import_module(NAMES[0])
    fit(lightning, BenchmarkCallback(tmp_path), batches=2)
    with pytest.raises(RecordError, match="already holds the steps of a run"):
        fit(lightning, BenchmarkCallback(tmp_path), batches=2)
    assert len(RunDirectory(tmp_path).read_steps()) == 2


def test_micro_batches_count_as_one_step(tmp_path):
    fit(importlib.import_module(NAMES[0]), BenchmarkCallback(tmp_path), accumulate_grad_batches=3)
    assert [step.step for step in RunDirectory(tmp_path).read_steps()] == [1, 2]


def test_a_loss_that_is_not_a_number_is_a_finding(tmp_path):
    fit(importlib.import_module(NAMES[0]), BenchmarkCallback(tmp_path), batches=2, loss_factor=float("nan"))
    steps = RunDirectory(tmp_path).read_steps()
    assert [(step.loss, step.finite) for step in steps] == [(None, False), (None, False)]


def test_tokens_that_nobody_tells_are_absent(tmp_path):
    fit(importlib.import_module(NAMES[0]), BenchmarkCallback(tmp_path), batches=2)
    assert {step.tokens for step in RunDirectory(tmp_path).read_steps()} == {None}


KILLED = """
import os, signal, torch, pytorch_lightning as lightning
from utils import BenchmarkCallback
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=[BenchmarkCallback("FOLDER")], **options).fit(
    Module(), torch.utils.data.DataLoader(torch.randn(8, 4))
)
"""


def test_a_kill_loses_the_running_step_and_no_other(tmp_path):
    code = LIGHTLY + KILLED.replace("FOLDER", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert done.returncode == -9
    assert [step.step for step in RunDirectory(tmp_path).read_steps()] == [1, 2, 3, 4, 5]
