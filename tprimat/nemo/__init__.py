"""Train a plan with NeMo 2's own recipe and trainer. Importing this module imports nothing from NeMo."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tprimat.core.errors import LaunchError
from tprimat.engines.nemo import INSTALL
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import RunRecord
from tprimat.train import startup
from tprimat.train.callback import BenchmarkCallback
from tprimat.train.profiler import profiling_callbacks
from tprimat.train.rank import StepLog, running_record


def train(plan: RunPlan) -> None:
    """Train a plan on this rank of torchrun."""
    if not startup.transformer_engine_is_usable():  # before anything imports megatron.core
        raise LaunchError("Transformer Engine cannot be imported.", why="NeMo's layers need it.", fix=INSTALL)
    try:
        import fiddle

        from tprimat.nemo.recipe import build_recipe
    except ImportError as error:
        raise LaunchError(f"NeMo cannot be imported: {error}.", fix=INSTALL) from error
    startup.resume_garbage_collection()
    fiddle.build(build_recipe(plan, [NemoCallback(plan), *profiling_callbacks(plan)]))()


class NemoCallback(BenchmarkCallback):
    """BenchmarkCallback that reads from the running NeMo how many tokens a step has, and what runs."""

    def __init__(self, plan: RunPlan) -> None:
        from tprimat.train.observed import FirstBatchHook

        super().__init__(plan.run_directory, describe=self._what_runs, log=StepLog(plan))
        self.plan = plan
        self.watch = FirstBatchHook()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Observe the first batch, too, and where routers send tokens."""
        self.watch.attach(list(trainer.strategy.megatron_parallel))
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Close a step; its tokens are known from its first micro-batch, and the experts' loads from all."""
        if self.watch.seen is not None:
            self.tokens_per_step = self.watch.seen["tokens_per_step"]
        if self.watch.watches_routers:
            from tprimat.train.observed import mean_loads

            known = outputs if isinstance(outputs, Mapping) else {}
            outputs = {**known, **mean_loads(self.watch.models, trainer.strategy.root_device)}
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep Lightning from copying weights and states to the host at the end, where runs of 8 billion took half a minute."""
        super().on_train_end(trainer, pl_module)
        trainer.strategy.optimizers = []
        pl_module.cpu = lambda: pl_module

    def _what_runs(self, trainer: Any, _: Any) -> RunRecord:
        plan, asked = self.plan, {name: value for name, value in asdict(self.plan.nemo).items() if value is not None}
        evidence = self.watch.evidence(
            trainer.strategy.optimizers[0].mcore_optimizer,
            fp8_asked=plan.workload.matmul_dtype == "fp8",
            data=f"NeMo {type(trainer.datamodule).__name__}",
        )
        running = self.watch.running_options(trainer.strategy.megatron_parallel[0].ddp_config)
        ignored = (f"{name}: {asked[name]} was asked for, {running[name]} ran" for name in asked if running[name] != asked[name])
        return running_record(plan, evidence, running, ignored)
