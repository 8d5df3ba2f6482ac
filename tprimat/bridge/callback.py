"""Bridge's training loop as seen by BenchmarkCallback, and evidence of what it runs."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.core import parallel_state

from tprimat.engines.bridge import recipe_name
from tprimat.plan.schema import RunPlan
from tprimat.records.schema import RunRecord
from tprimat.train.callback import BenchmarkCallback
from tprimat.train.observed import FirstBatchHook, mean_loads
from tprimat.train.profiler import profiling_callbacks
from tprimat.train.rank import StepLog, local_rank, running_record

LOSS = "lm loss"
"""Bridge's name of the loss of a step, which the last pipeline stage has."""


class Reporter(Callback):  # type: ignore[misc]
    """Hands Bridge's events on to the callbacks that a plan wants, as if a Lightning Trainer called them."""

    def __init__(self, plan: RunPlan, cfg: Any) -> None:
        self.plan = plan
        self.cfg = cfg
        self.batch = FirstBatchHook()
        benchmark = BenchmarkCallback(plan.run_directory, describe=self._what_runs, log=StepLog(plan))
        self.benchmark = benchmark
        self.callbacks = [benchmark, *profiling_callbacks(plan)]
        device = torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")
        self.module = SimpleNamespace(device=device, automatic_optimization=False)

    def on_train_start(self, context: CallbackContext) -> None:
        """Begin to observe, and start the clock."""
        self.context = context
        self.batch.attach(context.model)
        self.trainer = SimpleNamespace(  # what the callbacks ask of a Lightning Trainer
            accumulate_grad_batches=1,
            callback_metrics={},
            global_rank=dist.get_rank(),
            global_step=context.state.train_state.step,
            max_steps=self.plan.steps,
            optimizers=(context.optimizer,),
            strategy=SimpleNamespace(broadcast=_broadcast),
        )
        for callback in self.callbacks:
            callback.on_train_start(self.trainer, self.module)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Note the learning rate of the step."""
        self.benchmark.on_train_batch_start(self.trainer, self.module, None, 0)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Close a step. Bridge raises its own count of steps afterwards."""
        self.context = context
        self.trainer.global_step = context.state.train_state.step + 1
        outputs = {
            **(mean_loads(self.batch.models, self.module.device) if self.batch.watches_routers else {}),
            "loss": self._loss(context),
            "grad_norm": context.grad_norm,
            "tokens": (self.batch.seen or {}).get("tokens_per_step"),
        }
        for callback in self.callbacks:
            callback.on_train_batch_end(self.trainer, self.module, outputs, None, 0)

    def on_train_end(self, context: CallbackContext) -> None:
        """Write what remains."""
        for callback in self.callbacks:
            callback.on_train_end(self.trainer, self.module)

    def _loss(self, context: CallbackContext) -> torch.Tensor | None:
        """Return the step's loss on every rank: the last stage sends it to the others."""
        own = (context.loss_dict or {}).get(LOSS)
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return own
        loss = torch.zeros(1, device=self.module.device) if own is None else own.detach().float().reshape(1)
        dist.broadcast(
            loss, parallel_state.get_pipeline_model_parallel_last_rank(), parallel_state.get_pipeline_model_parallel_group()
        )
        return loss

    def _what_runs(self, trainer: Any, module: Any) -> RunRecord:
        del trainer, module
        data = self.cfg.dataset.description
        evidence = self.batch.evidence(self.context.optimizer, fp8_asked=self.plan.workload.narrow, data=data)
        options = {"recipe": recipe_name(self.plan), **self.batch.running_options(self.context.model[0].ddp_config)}
        return running_record(self.plan, evidence, options)


def _broadcast(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
