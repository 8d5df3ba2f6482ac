"""Train a plan on the embedded engine."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tprimat.megatron.evidence import observe
from tprimat.megatron.module import MegatronModule, MegatronStrategy
from tprimat.megatron.options import recorded, resolve
from tprimat.plan.evidence import mismatches
from tprimat.plan.schema import EngineOptions, RunPlan
from tprimat.records.environment import software_versions
from tprimat.records.schema import RunRecord
from tprimat.records.store import RunDirectory
from tprimat.train.callback import BenchmarkCallback, launched_record, lightning, note_ended, quieten
from tprimat.train.device import local_rank
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
    options = resolve(plan, torch.device("cuda" if on_gpu else "cpu"))
    recording = BenchmarkCallback(directory, describe=_describer(plan, options, redirected), log=StepLog(plan))
    measured = [recording, *profiling_callbacks(plan), *([callback] if callback else [])]
    trainer = lightning.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=plan.gpus_per_node,
        num_nodes=plan.nodes,
        strategy=MegatronStrategy(plan, process_group_backend="nccl" if on_gpu else "gloo"),
        max_steps=plan.steps,
        callbacks=measured,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
    )
    with attention_preference():
        trainer.fit(MegatronModule(plan, options))
    if trainer.global_rank == 0:
        note_ended(RunDirectory(directory))


def attention_preference() -> AbstractContextManager[Any]:
    """Return a context in which torch prefers cuDNN's attention on an NVIDIA GPU, as its newer versions do by themselves."""
    if not torch.cuda.is_available():
        return nullcontext()
    cudnn = [] if torch.version.hip else [SDPBackend.CUDNN_ATTENTION]
    return sdpa_kernel([*cudnn, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)


def _describer(plan: RunPlan, options: EngineOptions, redirected: bool) -> Any:
    def describe(trainer: Any, module: MegatronModule) -> RunRecord:
        evidence = observe(module, redirected)
        # Before the first step, what was asked for: a run that is killed never comes here again.
        graphs = module.graphs is not None and (module.graphs.recorded or trainer.global_step == 0)
        return replace(
            launched_record(plan),
            software=software_versions(),
            profiled_steps=slowed_steps(plan),
            engine_options=recorded(plan, replace(options, cuda_graphs=graphs)),
            evidence=evidence,
            mismatches=mismatches(plan, evidence),
        )

    return describe
