"""Training steps of different micro-batch sizes, to see what each allocates: what the ranks do when a plan says "auto"."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from tprimat.megatron.module import MegatronModule
from tprimat.megatron.options import ActiveOptions
from tprimat.plan.micro_batch import KEPT_FREE, candidates, next_candidate, trial_micro_batches
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import MicroBatchTrial, StepRecord
from tprimat.records.store import RunDirectory
from tprimat.train.device import available_bytes, peak_bytes, start_peak


class MicroBatchTrials(MegatronModule):
    """The model and optimizer of a plan, trained for one step with each size that is worth trying.

    A first step with the smallest size makes the optimizer's states and is not counted. After each further one all ranks
    know the worst rank's peak, so that they agree on what comes next. A rank that runs out of memory ends the process, and
    the launcher knows which size it was.
    """

    def __init__(self, plan: RunPlan, options: ActiveOptions) -> None:
        super().__init__(plan, options)
        self.directory = RunDirectory(Path(plan.run_directory))
        self.sizes = candidates(plan.layout, plan.batch)
        self.trials = list(self.directory.read_trials())
        self.size = self.sizes[0]
        self.steps_made = 0

    @property
    def micro_batch(self) -> int:
        """Sequences in one micro-batch of the step that comes next."""
        return self.size

    def train_dataloader(self) -> DataLoader[Any]:
        """As many steps as there may be; each makes its own tokens."""
        return DataLoader(range(self.plan.steps), batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """One optimizer step with the size that comes next, and what it allocated."""
        del batch
        begun = time.perf_counter()
        start_peak(self.device)
        outputs = super().training_step(self._tokens(), batch_idx)
        peak, limit = self._over_all_ranks_memory()
        self.steps_made += 1
        if self.steps_made > 1:
            trial = MicroBatchTrial(micro_batch_sequences=self.size, peak_bytes=peak, limit_bytes=limit)
            self.trials.append(trial)
            if self.trainer.global_rank == 0:
                self.directory.append_trial(trial)
        if self.trainer.global_rank == 0:
            seconds = time.perf_counter() - begun
            self.directory.append_step(StepRecord(step=self.steps_made, step_seconds=seconds, peak_allocated_bytes=peak))
        size = next_candidate(self.sizes, self.trials)
        self.size = self.size if size is None else size
        self.trainer.should_stop = size is None
        return outputs

    def _tokens(self) -> list[Tensor]:
        """Micro-batches of noise, each (micro-batch, sequence_tokens + 1)."""
        plan = self.plan
        steps = plan.batch.global_batch_sequences // (self.size * plan.layout.data)
        shape = (self.size, plan.batch.sequence_tokens + 1)
        return [
            torch.randint(plan.shape.vocabulary, shape, device=self.device)
            for _ in range(trial_micro_batches(plan.layout, steps))
        ]

    def _over_all_ranks_memory(self) -> tuple[int, int]:
        """The largest peak of any rank, and the smallest limit: bytes."""
        limit = int(available_bytes(self.device, self.plan.gpus_per_node) * (1 - KEPT_FREE))
        if self.plan.micro_batch_memory_bytes is not None:
            limit = min(limit, self.plan.micro_batch_memory_bytes)
        worst = torch.tensor([peak_bytes(self.device), -limit], device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        peak, lowest = worst.tolist()
        return peak, -lowest
