"""Megatron-Core under a Lightning Trainer: one batch is one global batch, one training_step is one optimizer step."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.module import MegatronModule as MegatronCoreModule
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.utils.data import DataLoader

from tprimat.megatron import compat, fp8
from tprimat.megatron.attention import own_pieces
from tprimat.megatron.graphs import CudaRecorder, MicroBatch, StageGraphs, StepGraphs
from tprimat.megatron.linear import ChosenProducts
from tprimat.megatron.loss import ChunkedLossModel
from tprimat.megatron.model import build_chunks, transformer_config
from tprimat.megatron.optimizer import MegatronOptimizer, PlainAdamW, ScheduledOptimizer
from tprimat.megatron.wgrad import begin_step, check_all_received, overwritten_weights
from tprimat.plan.graphs import launches_graphs
from tprimat.plan.schema import EngineOptions, RunPlan
from tprimat.train import startup
from tprimat.train.callback import LOADS
from tprimat.train.compat import lightning
from tprimat.train.data import GlobalBatches, Sequences, open_sequences
from tprimat.train.observed import SUMS, batch_facts, load_sums

BACKWARD_SHARE = 2 / 3
"""Of a micro-batch's passes: two of the three products with each weight. The times of ranks scale with it, not their ratio."""


class MegatronModule(lightning.LightningModule):  # type: ignore[misc]
    """The model of a plan, its data and its optimizer."""

    automatic_optimization = False

    def __init__(self, plan: RunPlan, options: EngineOptions) -> None:
        super().__init__()
        self.plan = plan
        self.options = options
        self.chunks: list[MegatronCoreModule] = []
        self.overwritten: list[torch.nn.Parameter] = []
        self.sequences: Sequences | None = None
        self.observed: dict[str, Any] | None = None
        self.before_gradient_sync: list[Callable[[float], None]] = []
        """Called in each step before this rank may wait for gradients of others, with the share of its own work that is done; not
        where a CUDA graph holds both passes of a micro-batch."""
        self.graphs: StepGraphs | StageGraphs | None = None
        self.micro_batches_per_step = self.passed_forward = 0

    def configure_model(self) -> None:
        """Build this rank's chunks, split over the replicas or with gradient buffers over them."""
        if self.chunks:
            return
        plan, options = self.plan, self.options
        if options.cuda_graphs and plan.workload.layout.pipeline > 1:
            stages_left = plan.workload.layout.pipeline - parallel_state.get_pipeline_model_parallel_rank()
            self.graphs = StageGraphs(self._stage, self._alone, CudaRecorder(), in_flight=stages_left)
        elif options.cuda_graphs:
            self.graphs = StepGraphs(self._passes, CudaRecorder())
        self.config = transformer_config(plan, self.device, options)
        chunks = build_chunks(plan, self.config, options, self.device)
        with nullcontext() if self.graphs is None else self.graphs.run():
            self.chunks += chunks if options.fully_shard else self._with_gradient_buffers(chunks)
        startup.reached("model_built")

    def _with_gradient_buffers(self, chunks: list[GPTModel]) -> Iterator[DistributedDataParallel]:
        options = self.options
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=options.distributed_optimizer,
            grad_reduce_in_fp32=options.gradients == "fp32",
            overlap_grad_reduce=True,
            overlap_param_gather=options.distributed_optimizer,
            average_in_collective=self.device.type == "cuda",  # gloo only sums; then Megatron scales the buffer beforehand
        )
        for number, chunk in enumerate(chunks):
            model = Float16Module(self.config, chunk) if self.config.bf16 else chunk
            # Only the first chunk's buckets overlap from the start: Megatron-LM does the same under virtual pipelining.
            buffered = DistributedDataParallel(self.config, ddp, model, disable_bucketing=number > 0)
            if not isinstance(self.graphs, StageGraphs):  # all micro-batches of a slot add their gradients
                self.overwritten += overwritten_weights(buffered)
            yield buffered

    def configure_optimizers(self) -> ScheduledOptimizer:
        """Build the optimizer, and give its functions to Megatron's schedule."""
        options = self.options
        kind = PlainAdamW if options.fully_shard or options.optimizer_states == "bf16" else MegatronOptimizer
        self.megatron_optimizer: ScheduledOptimizer = kind(self.chunks, self.plan, options)
        self.config.finalize_model_grads_func = self._finalize_gradients
        if not options.fully_shard:
            functions = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = functions[0] if len(functions) == 1 else functions
        return self.megatron_optimizer

    def train_dataloader(self) -> DataLoader[list[Tensor]]:
        """Return this replica's micro-batches, step by step."""
        self.sequences = open_sequences(self.plan, self.plan.workload.shape.vocabulary)
        place = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        batches = GlobalBatches(self.sequences, self.plan, self.plan.workload.micro_batch, place)
        return DataLoader(batches, batch_size=None, pin_memory=self.device.type == "cuda")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        """Run one optimizer step over the micro-batches of this replica, each (micro_batch, sequence_tokens + 1).

        Returns loss (mean over the global batch, the same on every rank), grad_norm, learning_rate, tokens (over all ranks), and
        in a model with experts expert_load, rank_load and dropped.
        """
        del batch_idx
        optimizer = self.optimizers()
        rate = self.megatron_optimizer.learning_rate
        fp8.next_step()
        if not self.options.fully_shard:
            begin_step(self.chunks, self.overwritten)
        self.micro_batches_per_step, self.passed_forward = len(batch), 0
        for part in (part for chunk in self.chunks for part in chunk.modules()):
            if isinstance(part, ChunkedLossModel):
                part.micro_batches = len(batch)
        optimizer.zero_grad()
        losses = self._launch_graphs(self.graphs, batch) if isinstance(self.graphs, StepGraphs) else self._pass_through(batch)
        with torch.profiler.record_function("optimizer_step") if self.plan.profiling.enabled else nullcontext():
            optimizer.step()
        loss, tokens, *loads = self._over_all_ranks(losses, batch)
        if self.observed is None:
            self.observed = batch_facts(batch[0][:, :-1], len(batch)) | {"tokens_per_step": int(tokens.item())}
            # What lives now stays: without this, Python searches all of it for garbage again and again while the GPU waits.
            gc.collect()
            gc.freeze()
        outputs = {"loss": loss, "grad_norm": self.megatron_optimizer.grad_norm, "learning_rate": rate, "tokens": tokens}
        return {**outputs, **dict(zip(LOADS, loads, strict=True))} if loads else outputs

    def _pass_through(self, batch: list[Tensor]) -> list[dict[str, Tensor]]:
        """Run all passes of a step by Megatron's schedule; a replica's last stage returns the losses of its micro-batches."""
        with nullcontext() if self.graphs is None else self.graphs.run():
            if isinstance(self.graphs, StageGraphs):
                self._prepare(self.graphs)
            losses = get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=[iter(batch) for _ in self.chunks] if len(self.chunks) > 1 else iter(batch),
                model=self.chunks,
                num_microbatches=len(batch),
                seq_length=self.plan.workload.sequence_tokens,
                micro_batch_size=self.plan.workload.micro_batch,
                forward_only=False,
            )
        check_all_received(self.overwritten)
        return losses  # type: ignore[no-any-return]

    def _prepare(self, graphs: StageGraphs) -> None:
        """Begin a step of a stage: nothing that graphs repeat may differ between micro-batches."""
        if self.options.distributed_optimizer:
            self.chunks[0].start_param_sync(force_sync=True)
        fp8.refresh_weights()
        graphs.begin_step()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run a pass of a stage that neither reduces gradients nor leaves an exchange half done."""
        with self.chunks[0].no_sync():
            yield
        self._begin_exchanges_anew()

    def _stage(self, tokens: Tensor, received: Tensor | None) -> Tensor:
        (chunk,) = self.chunks
        get_attr_wrapped_model(chunk, "set_input_tensor")([received])
        return self._losses_of(chunk, tokens)

    def _launch_graphs(self, graphs: StepGraphs, batch: list[Tensor]) -> list[dict[str, Tensor]]:
        """Run all passes of a step as CUDA graphs; the same as _pass_through."""
        with graphs.run():
            losses, launched_by_python = graphs.step(batch, self.device)
        if launched_by_python:
            check_all_received(self.overwritten)
        return [{"loss": loss} for loss in losses]

    def _passes(self, tokens: Tensor, place: MicroBatch) -> Tensor:
        """Run both passes of a micro-batch as Megatron's schedule without pipelining does; return its mean loss."""
        (chunk,) = self.chunks
        if place.first and hasattr(chunk, "set_is_first_microbatch"):
            chunk.set_is_first_microbatch()
        averages_later = self.config.no_sync_func if self.config.no_sync_func and not place.last else nullcontext
        with averages_later():
            loss, parts = _mean_loss(self._losses_of(chunk, tokens))
            loss = loss * parallel_state.get_context_parallel_world_size() / self.micro_batches_per_step
            torch.autograd.backward(loss)
        if place.last:
            finalize_model_grads([chunk])
        self._begin_exchanges_anew()
        return parts["loss"]

    def _begin_exchanges_anew(self) -> None:
        (chunk,) = self.chunks
        for exchange in {part.tp_context.exchange for part in chunk.modules() if isinstance(part, ChosenProducts)}:
            if exchange is not None:
                exchange.begin_anew()

    def _finalize_gradients(self, *arguments: Any, **named: Any) -> None:
        if self.plan.workload.pipeline_parallel > 1:
            self._may_wait(1.0)
        if isinstance(self.graphs, StageGraphs) and self.graphs.recorded:
            self.chunks[0].start_grad_sync()  # which the backward passes did not
        if not self.options.fully_shard:
            finalize_model_grads(*arguments, **named)

    def _forward(self, batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
        tokens = next(batches)
        if isinstance(self.graphs, StageGraphs):
            losses = self.graphs.forward(tokens, get_attr_wrapped_model(model, "decoder").input_tensor, self.device)
        else:
            losses = self._losses_of(model, tokens.to(self.device, non_blocking=True))
        self.passed_forward += 1
        if self.plan.workload.pipeline_parallel == 1 and self.passed_forward == self.micro_batches_per_step:
            self._may_wait(1 - BACKWARD_SHARE / self.micro_batches_per_step)
        return losses, _mean_loss

    def _may_wait(self, done: float) -> None:
        for note in self.before_gradient_sync:
            note(done)

    def _losses_of(self, model: Any, tokens: Tensor) -> Tensor:
        every = torch.arange(tokens.shape[1] - 1, device=self.device).expand(tokens.shape[0], -1)
        inputs, labels, positions = (own_pieces(part).contiguous() for part in (tokens[:, :-1], tokens[:, 1:], every))
        return model(inputs, positions, None, labels=labels)  # type: ignore[no-any-return]

    def _over_all_ranks(self, losses: list[dict[str, Tensor]], batch: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the mean loss of the global batch, the tokens that all ranks trained on, and LOADS of a model with experts.

        One small all-reduce gives all of them. A replica's last stage knows its loss, and each of its ranks its tokens: one rank
        of a replica reports each.
        """
        totals = torch.zeros(2 + SUMS, device=self.device, dtype=torch.float64)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            if losses:
                replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
                totals[0] = torch.stack([part["loss"] for part in losses]).double().mean() / replicas
            if parallel_state.is_pipeline_first_stage():
                shared_by = parallel_state.get_context_parallel_world_size()
                # fill_, since assigning a Python number copies it from the host and waits for the device.
                totals[1].fill_(sum(part.shape[0] * (part.shape[1] - 1) for part in batch) / shared_by)
        has_experts = self.config.num_moe_experts is not None
        if has_experts:
            totals[2:] = load_sums(self.chunks, self.device)
        dist.all_reduce(totals)
        *sums, times = totals[2:].unbind()
        return (totals[0], totals[1], *((part / times for part in sums) if has_experts else ()))


def _mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss; the argument may be the losses of all tokens or already their mean."""
    loss = losses.float().mean()
    # Megatron's schedule multiplies by the context-parallel ranks, whose gradients are then averaged like those of replicas.
    # It also divides by the number of micro-batches, in place, hence the copy.
    return loss / parallel_state.get_context_parallel_world_size(), {"loss": loss.detach().clone()}


def initialize_parallel_state(plan: RunPlan) -> None:
    """Split the ranks as the plan says, and seed Megatron's random number generators."""
    layout = plan.workload.layout
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,  # experts are whole on their rank
        create_gloo_process_groups=False,  # for distributed checkpoints alone
    )
    recordable = launches_graphs(plan) and torch.cuda.is_available()
    tensor_parallel.model_parallel_cuda_manual_seed(plan.seed, use_cudagraphable_rng=recordable)


class MegatronStrategy(compat.UnwrappedDDPStrategy):
    """Lightning's strategy for the engine: it joins the process group and leaves the parallelism to Megatron-Core."""

    strategy_name = "megatron"

    def __init__(self, plan: RunPlan, **options: Any) -> None:
        super().__init__(**options)
        self.plan = plan

    def setup_environment(self) -> None:
        """Join the process group, then split it as the plan says."""
        super().setup_environment()
        initialize_parallel_state(self.plan)
        startup.reached("process_group")

    def teardown(self) -> None:
        """Destroy the groups of the split, after the graphs that hold their exchanges."""
        if isinstance(self.lightning_module, MegatronModule) and self.lightning_module.graphs is not None:
            self.lightning_module.graphs.forget()
        super().teardown()
        parallel_state.destroy_model_parallel()
