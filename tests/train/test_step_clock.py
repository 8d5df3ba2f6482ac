"""When steps ended on the clock of the run's record: a real Lightning Trainer on the CPU."""

import time
from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest
import torch

from tprimat.records.schema import Machine, RunRecord
from tprimat.records.store import RunDirectory
from tprimat.train.callback import BenchmarkCallback, lightning

LATE = 100.0
"""Seconds between the record's start and training."""


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        time.sleep(0.01)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def record(started_at):
    absent = {f"{kind}_parallel": None for kind in ("tensor", "pipeline", "data")}
    absent |= dict.fromkeys(("micro_batch_sequences", "global_batch_sequences", "sequence_tokens", "matmul_dtype", "strategy"))
    machine = Machine(platform="cpu", accelerator=None, gpus_per_node=1, nodes=1)
    told = {"run_id": "r", "model": "line", "engine": "megatron", "clock": "step_end", "outcome": "running"}
    return RunRecord(**absent, **told, machine=machine, started_at=started_at)


def train(folder, describe):
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=4,
        callbacks=[BenchmarkCallback(folder, describe=describe)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
    return RunDirectory(folder).read_steps()


@pytest.mark.filterwarnings("ignore")
def test_each_step_says_when_it_ended_since_the_run_was_started(tmp_path):
    started_at = (datetime.now(timezone.utc) - timedelta(seconds=LATE)).isoformat(timespec="milliseconds")
    began = time.time()
    steps = train(tmp_path, lambda trainer, module: record(started_at))
    ends = [step.ended_at_seconds for step in steps]
    assert LATE < ends[0] < ends[-1] < LATE + time.time() - began + 0.01
    assert [end - before for before, end in pairwise(ends)] == pytest.approx([step.step_seconds for step in steps[1:]])


@pytest.mark.filterwarnings("ignore")
def test_without_a_description_moments_count_from_the_callbacks_own_start(tmp_path):
    steps = train(tmp_path, None)
    ends = [step.ended_at_seconds for step in steps]
    assert ends == sorted(ends)
    assert ends[0] > 0
