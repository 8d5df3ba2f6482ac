"""Bridge's training loop as seen by BenchmarkCallback, and evidence of what it runs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.core import parallel_state

from tprimat.megatron.evidence import capacity_of, count_parameters, dtype_name, matmul_dtype, parallel_sizes, routing_of
from tprimat.megatron.transformer_engine import multiplied_in_fp8, scaling_and_attention, te_modules
from tprimat.plan.evidence import mismatches
from tprimat.plan.schema import RunPlan
from tprimat.records.environment import software_versions
from tprimat.records.evidence import REDIRECTED, graded, with_facts
from tprimat.records.schema import Evidence, RunRecord
from tprimat.train.callback import BenchmarkCallback, launched_record
from tprimat.train.device import local_rank
from tprimat.train.first_batch import FirstBatchHook
from tprimat.train.profiler import profiling_callbacks, slowed_steps
from tprimat.train.step_log import StepLog

LOSS = "lm loss"
"""Bridge's name of the loss of a step, which the last pipeline stage has."""


class Reporter(Callback):  # type: ignore[misc]
    """Hands Bridge's events on to the callbacks that a plan wants, as if a Lightning Trainer called them."""

    def __init__(self, plan: RunPlan, cfg: Any, *, redirected: bool) -> None:
        self.plan = plan
        self.cfg = cfg
        self.redirected = redirected
        self.batch = FirstBatchHook()
        benchmark = BenchmarkCallback(plan.run_directory, describe=self._what_runs, log=StepLog(plan, slowed_steps(plan)))
        self.benchmark = benchmark
        self.callbacks = [benchmark, *profiling_callbacks(plan)]
        device = torch.device("cpu") if redirected else torch.device("cuda", local_rank())
        self.module = SimpleNamespace(device=device, automatic_optimization=False)
        self.trainer = _Trainer(plan.steps)

    def on_train_start(self, context: CallbackContext) -> None:
        """Begin to observe, and start the clock."""
        self.context = context
        self.batch.attach(context.model)
        self.trainer.begin(context.state.train_state.step, context.optimizer)
        for callback in self.callbacks:
            callback.on_train_start(self.trainer, self.module)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Note the learning rate of the step."""
        self.benchmark.on_train_batch_start(self.trainer, self.module, None, 0)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Close a step. Bridge raises its own count of steps afterwards."""
        self.context = context
        self.trainer.global_step = context.state.train_state.step + 1
        seen = self.batch.seen
        outputs = {
            "loss": self._loss(context),
            "grad_norm": context.grad_norm,
            "tokens": None if seen is None else seen.tokens_per_step,
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
        evidence = observe(self.context, self.batch, self.plan, self.module.device, redirected=self.redirected)
        evidence = with_facts(evidence, data=self.cfg.dataset.description)
        return replace(
            launched_record(self.plan),
            software=software_versions(),
            evidence=evidence,
            engine_options=running_options(self.cfg, self.context),
            mismatches=mismatches(self.plan, evidence),
        )


class _Trainer:
    """What the callbacks ask of a Lightning Trainer."""

    accumulate_grad_batches = 1
    callback_metrics: dict[str, Any] = {}  # noqa: RUF012 - never written

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.global_step = 0
        self.optimizers: tuple[Any, ...] = ()

    def begin(self, step: int, optimizer: Any) -> None:
        """Take the place where training starts."""
        self.global_step, self.optimizers = step, (optimizer,)

    @property
    def global_rank(self) -> int:
        """This process among all ranks."""
        return dist.get_rank()

    @property
    def strategy(self) -> "_Trainer":
        """The part of a Trainer that speaks to other ranks."""
        return self

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


def observe(
    context: CallbackContext, batch: FirstBatchHook, plan: RunPlan, device: torch.device, *, redirected: bool
) -> Evidence:
    """Return evidence of a running pretrain(). Every rank must call it: the parameter count is summed over all of them."""
    models, seen, layer = batch.models, batch.seen, batch.layer
    parameters = [parameter for model in models for parameter in model.parameters()]
    config, first = models[0].config, parameters[0]
    fused = te_modules(models)
    in_fp8 = multiplied_in_fp8(fused) if fused else False
    dtype = "fp8" if in_fp8 else None if in_fp8 is None and plan.workload.matmul_dtype == "fp8" else matmul_dtype(first.dtype)
    scaling, attention = scaling_and_attention(fused) if dtype == "fp8" else (None, None)
    again = layer.recomputed(device) if layer else None
    evidence = with_facts(
        parallel_sizes(),
        sequence_parallel=layer.sequence_parallel(seen.sequence_tokens) if seen and layer else None,
        micro_batch_sequences=seen.micro_batch_sequences if seen else None,
        global_batch_sequences=seen.global_batch_sequences if seen else None,
        sequence_tokens=seen.sequence_tokens if seen else None,
        tokens_per_step=seen.tokens_per_step if seen else None,
        parameter_dtype=dtype_name(first.dtype),
        matmul_dtype=dtype,
        attention_dtype=attention,
        fp8_scaling=scaling,
        gradient_dtype=dtype_name(first.main_grad.dtype),
        parameters=count_parameters(parameters, device),
        recompute=again.recompute if again else None,
        recompute_modules=again.modules if again else None,
        recompute_layers=again.layers if again else None,
        routing=routing_of(config),
        expert_capacity=capacity_of(config),
        attention="Transformer Engine" if fused else "Megatron-Core's local attention",
        transformer_engine=bool(fused),
        optimizer=_optimizer(context.optimizer),
        first_sequence=seen.first_sequence if seen else None,
        notes=(REDIRECTED,) if redirected else (),
    )
    return graded(evidence, dict.fromkeys(("routing", "expert_capacity", "attention_dtype"), "resolved"))


def _optimizer(megatron: Any) -> str:
    inner = getattr(megatron, "chained_optimizers", [megatron])[0]
    return f"{type(inner).__name__} over {type(inner.optimizer).__name__}"


def running_options(cfg: Any, context: CallbackContext) -> dict[str, Any]:
    """Return the settings of a recipe that change speed or memory, under Bridge's names, read from the built model."""
    config, replicas = context.model[0].config, context.model[0].ddp_config
    return {
        "cross_entropy_fusion_impl": config.cross_entropy_fusion_impl if config.cross_entropy_loss_fusion else None,
        "grad_reduce_in_fp32": replicas.grad_reduce_in_fp32,
        "overlap_grad_reduce": replicas.overlap_grad_reduce,
        "overlap_param_gather": replicas.overlap_param_gather,
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
        "tp_comm_overlap": config.tp_comm_overlap,
        "cuda_graph_impl": config.cuda_graph_impl,
        "moe_token_dispatcher_type": config.moe_token_dispatcher_type if config.num_moe_experts else None,
        **({"fp8_recipe": config.fp8_recipe} if config.fp8 else {}),
    }
