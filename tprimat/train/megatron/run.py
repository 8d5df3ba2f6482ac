"""Trains a plan on the embedded engine."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tprimat.errors import LaunchError
from tprimat.plan.expected import mismatches
from tprimat.plan.schema import RunPlan
from tprimat.record.environment import software_versions
from tprimat.record.schema import RunRecord
from tprimat.record.store import RunDirectory
from tprimat.train import early_start
from tprimat.train.accelerator import local_rank
from tprimat.train.callback import BenchmarkCallback
from tprimat.train.launched import launched_record, note_completed
from tprimat.train.lightning_api import lightning, quieten
from tprimat.train.megatron import fp8_kernels
from tprimat.train.megatron.active_options import ActiveOptions, decide
from tprimat.train.megatron.evidence import observe
from tprimat.train.megatron.micro_batch_trials import MicroBatchTrials
from tprimat.train.megatron.module import MegatronModule
from tprimat.train.megatron.strategy import MegatronStrategy
from tprimat.train.profiler import profiling_callbacks


def train(plan: RunPlan, redirected: bool) -> None:
    """Carry out a plan on this rank; torchrun has started as many as the plan names. The process group stays for another one.

    Args:
        plan: what to do.
        redirected: whether this process sends Megatron's CUDA calls to the CPU.
    """
    quieten()
    on_gpu = torch.cuda.is_available()
    directory = Path(plan.run_directory)
    if on_gpu:
        torch.cuda.set_device(local_rank())
        early_start.read_compiler()
    if plan.precision == "fp8" and not fp8_kernels.works_on(torch.device("cuda" if on_gpu else "cpu")):
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
