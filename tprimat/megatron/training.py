"""Train a plan on the embedded engine, or find the largest micro-batch that fits."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from tprimat.core.errors import LaunchError
from tprimat.core.workload import KEPT_FREE
from tprimat.megatron import fp8
from tprimat.megatron.compat import prefetch_compiler_key
from tprimat.megatron.evidence import observe
from tprimat.megatron.module import MegatronModule, MegatronStrategy
from tprimat.megatron.options import ResolvedOptions, recorded, resolve
from tprimat.plan.evidence import mismatches
from tprimat.plan.micro_batch import candidates, next_candidate, trial_micro_batches
from tprimat.plan.schema import RunPlan
from tprimat.records.environment import software_versions
from tprimat.records.schema import MicroBatchTrial, RunRecord, StepRecord
from tprimat.records.store import RunDirectory
from tprimat.train.callback import BenchmarkCallback, launched_record, lightning, note_ended, quieten
from tprimat.train.device import available_bytes, local_rank, peak_bytes, reset_peak
from tprimat.train.profiler import profiling_callbacks, slowed_steps
from tprimat.train.step_log import StepLog


def fit(plan: RunPlan, redirected: bool, callback: Any = None) -> None:
    """Train a plan with Lightning on this rank. The process group stays open for another plan.

    `redirected` says that Megatron's CUDA calls run on the CPU; `callback` is one of Lightning's, called beside ours.
    """
    quieten()
    on_gpu = torch.cuda.is_available()
    directory = Path(plan.run_directory)
    if on_gpu:
        torch.cuda.set_device(local_rank())
        prefetch_compiler_key()
    if plan.workload.matmul_dtype == "fp8" and not fp8.multiplies_fp8(torch.device("cuda" if on_gpu else "cpu")):
        why = f"This device or torch {torch.__version__} cannot multiply e5m2 with e4m3."
        raise LaunchError("fp8 does not work here.", why=why, fix="--precision bf16")
    options = resolve(plan, torch.device("cuda" if on_gpu else "cpu"))
    searches = plan.workload.micro_batch_sequences is None
    options = replace(options, cuda_graphs=options.cuda_graphs and not searches)
    log = StepLog(plan, slowed_steps(plan))
    recording = BenchmarkCallback(directory, describe=_describer(plan, options, redirected), log=log)
    measured = [recording, *profiling_callbacks(plan), *([callback] if callback else [])]
    trainer = lightning.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=plan.gpus_per_node,
        num_nodes=plan.nodes,
        strategy=MegatronStrategy(plan, process_group_backend="nccl" if on_gpu else "gloo"),
        max_steps=plan.steps,
        callbacks=[] if searches else measured,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    with attention_preference():
        trainer.fit((MicroBatchTrials if searches else MegatronModule)(plan, options))
    if trainer.global_rank == 0 and not searches:
        note_ended(RunDirectory(directory))


def attention_preference() -> AbstractContextManager[Any]:
    """Return a context in which torch prefers cuDNN's attention on an NVIDIA GPU, as its newer versions do by themselves."""
    if not torch.cuda.is_available():
        return nullcontext()
    cudnn = [] if torch.version.hip else [SDPBackend.CUDNN_ATTENTION]
    return sdpa_kernel([*cudnn, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)


def _describer(plan: RunPlan, options: ResolvedOptions, redirected: bool) -> Any:
    def describe(trainer: Any, module: MegatronModule) -> RunRecord:
        evidence = observe(module, redirected)
        # Before the first step, what was asked for: a run that is killed never comes here again.
        graphs = module.graphs is not None and (module.graphs.recorded or trainer.global_step == 0)
        return replace(
            launched_record(plan),
            software=software_versions(),
            engine_options=recorded(plan, replace(options, cuda_graphs=graphs)),
            evidence=evidence,
            mismatches=mismatches(plan, evidence),
        )

    return describe


# The search for a micro-batch that fits, for a plan that says "auto".


class MicroBatchTrials(MegatronModule):
    """The model and optimizer of a plan, trained for one step with each micro-batch size that is worth trying.

    A first step with the smallest size creates the optimizer's states and does not count. After each further step all ranks know
    the worst rank's peak, and so agree on the next size. A rank that runs out of memory ends the process, and the launcher knows
    the size.
    """

    def __init__(self, plan: RunPlan, options: ResolvedOptions) -> None:
        super().__init__(plan, options)
        self.directory = RunDirectory(Path(plan.run_directory))
        self.sizes = candidates(plan.workload)
        self.trials = list(self.directory.read_trials())
        self.size = self.sizes[0]
        self.steps_done = 0

    @property
    def micro_batch(self) -> int:
        """Sequences in one micro-batch of the next step."""
        return self.size

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a counter of steps; each step makes its own tokens."""
        return DataLoader(range(self.plan.steps), batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Run one optimizer step with the next size, and record what it allocated."""
        del batch
        begun = time.perf_counter()
        reset_peak(self.device)
        outputs = super().training_step(self._tokens(), batch_idx)
        peak, limit = self._memory_over_all_ranks()
        self.steps_done += 1
        if self.steps_done > 1:
            trial = MicroBatchTrial(micro_batch_sequences=self.size, peak_bytes=peak, limit_bytes=limit)
            self.trials.append(trial)
            if self.trainer.global_rank == 0:
                self.directory.append_trial(trial)
        if self.trainer.global_rank == 0:
            seconds = time.perf_counter() - begun
            self.directory.append_step(StepRecord(step=self.steps_done, step_seconds=seconds, peak_allocated_bytes=peak))
        size = next_candidate(self.sizes, self.trials)
        self.size = self.size if size is None else size
        self.trainer.should_stop = size is None
        return outputs

    def _tokens(self) -> list[Tensor]:
        """Return micro-batches of noise, each (micro-batch, sequence_tokens + 1)."""
        plan = self.plan
        steps = plan.workload.global_batch_sequences // (self.size * plan.workload.layout.data)
        shape = (self.size, plan.workload.sequence_tokens + 1)
        return [
            torch.randint(plan.workload.shape.vocabulary, shape, device=self.device)
            for _ in range(trial_micro_batches(plan.workload.layout, steps))
        ]

    def _memory_over_all_ranks(self) -> tuple[int, int]:
        """Return the largest peak of any rank and the smallest limit, in bytes."""
        limit = int(available_bytes(self.device, self.plan.gpus_per_node) * (1 - KEPT_FREE))
        if self.plan.micro_batch_memory_bytes is not None:
            limit = min(limit, self.plan.micro_batch_memory_bytes)
        worst = torch.tensor([peak_bytes(self.device), -limit], device=self.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        peak, lowest = worst.tolist()
        return peak, -lowest
