"""Trains a plan on the embedded engine."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tprimat.errors import LaunchError
from tprimat.megatron import fp8
from tprimat.megatron.evidence import observe
from tprimat.megatron.micro_batch_trials import MicroBatchTrials
from tprimat.megatron.module import MegatronModule, MegatronStrategy
from tprimat.megatron.options import ActiveOptions, decide
from tprimat.plan.evidence import mismatches
from tprimat.plan.schema import RunPlan
from tprimat.records.environment import software_versions
from tprimat.records.schema import RunRecord
from tprimat.records.store import RunDirectory
from tprimat.train import startup
from tprimat.train.callback import BenchmarkCallback
from tprimat.train.device import local_rank
from tprimat.train.lightning_api import lightning, quieten
from tprimat.train.profiler import profiling_callbacks
from tprimat.train.run_record import launched_record, note_completed


def fit(plan: RunPlan, redirected: bool) -> None:
    """Train a plan with Lightning on this rank. The process group stays open for another plan.

    Args:
        plan: what to do.
        redirected: whether this process sends Megatron's CUDA calls to the CPU.
    """
    quieten()
    on_gpu = torch.cuda.is_available()
    directory = Path(plan.run_directory)
    if on_gpu:
        torch.cuda.set_device(local_rank())
        startup.read_compiler()
    if plan.precision == "fp8" and not fp8.works_on(torch.device("cuda" if on_gpu else "cpu")):
        why = f"This device or torch {torch.__version__} multiplies no e5m2 with e4m3."
        raise LaunchError("fp8 does not work here.", why=why, fix="--precision bf16")
    options = decide(plan, torch.device("cuda" if on_gpu else "cpu"))
    searches = plan.batch.micro_batch_sequences == "auto"
    measured = [BenchmarkCallback(directory, describe=_describer(plan, options, redirected)), *profiling_callbacks(plan)]
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
    with attention_preference(options.cudnn_attention):
        trainer.fit((MicroBatchTrials if searches else MegatronModule)(plan, options))
    if trainer.global_rank == 0 and not searches:
        note_completed(RunDirectory(directory))


def attention_preference(cudnn: bool) -> AbstractContextManager[Any]:
    """Which attention kernels torch may choose: cuDNN's first, or all but cuDNN's, which newer versions prefer by themselves."""
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if not torch.cuda.is_available():
        return nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *others] if cudnn else others, set_priority=True)


def _describer(plan: RunPlan, options: ActiveOptions, redirected: bool) -> Any:
    def describe(trainer: Any, module: MegatronModule) -> RunRecord:
        del trainer
        evidence = observe(module, redirected)
        return replace(
            launched_record(plan),
            software=software_versions(),
            engine_options=asdict(options),
            matmul_dtype=evidence.matmul_dtype or plan.precision,
            evidence=evidence,
            mismatches=mismatches(plan, evidence),
        )

    return describe
