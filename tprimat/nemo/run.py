"""Trains a plan with NeMo 2's own recipe and trainer."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from tprimat.nemo.availability import pretrain_recipe
from tprimat.plan.evidence import mismatches
from tprimat.plan.schema import RunPlan
from tprimat.records.environment import software_versions
from tprimat.records.schema import RunRecord
from tprimat.records.store import RunDirectory
from tprimat.train import cpu_redirect, startup, transformer_engine
from tprimat.train.callback import BenchmarkCallback
from tprimat.train.profiler import profiling_callbacks
from tprimat.train.run_record import launched_record, note_completed


def train(plan: RunPlan) -> None:
    """Carry out a plan on this rank; torchrun has started as many as the plan names.

    Args:
        plan: what to do.

    Raises:
        LaunchError: NeMo is not there in full, or cannot do what the plan asks for.
    """
    redirected = cpu_redirect.install()
    pretrain_recipe(plan.nemo_recipe, plan.model)  # before our own imports of nemo, to name what is missing
    if redirected:
        from tprimat.nemo import cpu_redirect as nemo_redirect

        nemo_redirect.install()
    import fiddle
    import torch

    from tprimat.megatron.training import attention_preference
    from tprimat.nemo.recipe import Seeds, Surroundings, build_recipe

    startup.end_imports()
    here = Surroundings(on_gpu=not redirected, transformer_engine=transformer_engine.is_usable())
    callback = NemoCallback(plan, here)
    # Without Transformer Engine the attention is torch's, and the same kernels are preferred as in the embedded engine.
    cudnn = here.on_gpu and torch.version.hip is None and plan.engine_options.cudnn_attention is not False
    with attention_preference(cudnn):
        fiddle.build(build_recipe(plan, here, [Seeds(plan.seed), callback, *profiling_callbacks(plan)]))()
    if int(os.environ.get("RANK", "0")) == 0:
        note_completed(RunDirectory(Path(plan.run_directory)))


class NemoCallback(BenchmarkCallback):
    """BenchmarkCallback that knows from the running NeMo what a step trains on, and what runs."""

    def __init__(self, plan: RunPlan, here: Any) -> None:
        from tprimat.nemo.evidence import BatchWatch

        super().__init__(plan.run_directory, describe=self._what_runs)
        self.plan = plan
        self.here = here
        self.watch = BatchWatch()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Look at the first batch, too."""
        self.watch.attach(trainer.strategy)
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Close a step; the tokens of one are known from its first micro-batch."""
        if self.watch.seen is not None:
            self.tokens_per_step = self.watch.seen.tokens_per_step
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _what_runs(self, trainer: Any, _: Any) -> RunRecord:
        from tprimat.nemo.evidence import observe

        evidence = observe(trainer, self.watch, self.plan, self.here)
        return replace(
            launched_record(self.plan),
            software=software_versions(),
            matmul_dtype=evidence.matmul_dtype,
            evidence=evidence,
            mismatches=mismatches(self.plan, evidence),
        )
