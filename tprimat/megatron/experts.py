"""A mixture of experts in place of the feed-forward block: routing, the exchange of tokens between ranks, and the experts.

Each token passes a few of many experts (arXiv:1701.06538), which are spread over ranks (GShard, arXiv:2006.16668). Each choice
gets a place in the order of experts, by one prefix sum, and rows are written to places and added up from places, without atomic
additions: results do not depend on timing. The host reads how many rows ranks exchange while the device already works; with a
single rank it reads nothing. Experts are whole on their rank, and may be spread over tensor ranks, which have different tokens,
as over replicas.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import Parameter

from tprimat.megatron.compat import compiled_for_any_rows, grouped_matmul, triton_kernels
from tprimat.megatron.router import RoutedChoices, Router
from tprimat.megatron.wgrad import add_gradient, claim_first_gradient, let_accumulate
from tprimat.train.observed import RoutingCounts

LENGTHS = 16
"""Buffers for received rows are multiples of the sent rows / LENGTHS long."""


# Rows of hidden states that move to places in another order and back: each token has k choices, and each choice its own place.


def gather(rows: Tensor, source: Tensor) -> Tensor:
    """Return the rows with these numbers: shape (n, hidden), and (m,) -> (m, hidden)."""
    if kernels := triton_kernels(rows):
        return kernels.gather(rows.contiguous(), source)  # type: ignore[no-any-return]
    return rows.index_select(0, source)


def spread(x: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Write each token's row to each of its places, (tokens, k), times its weight: (tokens, hidden) -> (tokens x k, hidden)."""
    if kernels := triton_kernels(x):
        return kernels.spread(x.contiguous(), places.contiguous(), weights)  # type: ignore[no-any-return]
    copies = x[:, None].expand(*places.shape, -1) if weights is None else (x[:, None].float() * weights[..., None]).to(x.dtype)
    out = x.new_empty(places.numel(), x.shape[1])
    out[places.flatten()] = copies.reshape(out.shape)
    return out


def add_up(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Add up the rows at each token's places, each times a weight, in fp32: (tokens x k, hidden) -> (tokens, hidden)."""
    if kernels := triton_kernels(rows):
        return kernels.add_up(rows.contiguous(), places.contiguous(), weights)  # type: ignore[no-any-return]
    chosen = rows[places].float()
    return (chosen if weights is None else chosen * weights[..., None]).sum(dim=1).to(rows.dtype)


def weights_gradient(gradient: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Return the gradient of the weights of `add_up`, shape (tokens, k), fp32, from that of its result."""
    if kernels := triton_kernels(rows):
        return kernels.weights_gradient(gradient.contiguous(), rows.contiguous(), places.contiguous())  # type: ignore[no-any-return]
    return (rows[places].float() * gradient[:, None].float()).sum(dim=-1)


# Where each row goes.


def order_by_expert(counts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Say how rows that ranks sent, each sorted by expert, become `length` rows sorted by expert.

    `counts` are the rows from each rank for each expert, (ranks, experts). Returns for each row of the result the received row to
    read, some valid one behind the sum of counts; and how many rows each expert and all before it have, (experts,), int32.
    """
    ranks, experts = counts.shape
    received = counts.long()
    begins = (received.flatten().cumsum(0) - received.flatten()).view(ranks, experts)
    by_expert = received.t().flatten()
    stops = by_expert.cumsum(0)
    row = torch.arange(length, device=counts.device)
    part = torch.searchsorted(stops, row, right=True).clamp(max=ranks * experts - 1)
    source = begins.t().flatten()[part] + row - (stops - by_expert)[part]
    return torch.where(row < stops[-1], source, 0), stops.view(experts, ranks)[:, -1].to(torch.int32)


class ExpertExchange:
    """The rows of one micro-batch on their way to the experts and back, within the ranks that share the experts."""

    def __init__(self, routing: RoutedChoices, group: dist.ProcessGroup, experts_here: int) -> None:
        self.group, self.ranks, self.experts_here = group, group.size(), experts_here
        self.places, self.ends, self.counts, self.drops = routing.places, routing.ends, routing.counts, routing.drops
        self.arranged = False
        if self.ranks == 1:
            return
        # Begin to tell all ranks how many rows go where, and to copy all numbers to the host.
        everyone = self.counts.new_empty(self.ranks, self.counts.numel())
        dist.all_gather_into_tensor(everyone.view(-1), self.counts, group=self.group)
        self._everyone = everyone
        self._on_host = everyone
        self._copied: torch.cuda.Event | None = None
        if everyone.is_cuda:
            self._on_host = torch.empty(everyone.shape, dtype=everyone.dtype, pin_memory=True)
            self._on_host.copy_(everyone, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def _read_counts(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        rank = self.group.rank()
        numbers = self._on_host.view(self.ranks, self.ranks, self.experts_here).sum(dim=-1).tolist()
        self.sent_rows: list[int] = numbers[rank]
        self.received_rows: list[int] = [row[rank] for row in numbers]
        self.arriving = sum(self.received_rows)
        step = max(1, -(-self.places.numel() // LENGTHS))
        self.length = step * max(1, -(-self.arriving // step))

    def to_experts(self, rows: Tensor) -> Tensor:
        """Move rows, sorted by expert over all ranks, to the experts of this rank: (tokens x k, hidden) -> (n, hidden)."""
        if self.ranks == 1:
            return rows
        if not self.arranged:
            self._read_counts()
        arrived = rows.new_empty(self.length, rows.shape[1])
        work = dist.all_to_all_single(
            arrived[: self.arriving],
            rows[: sum(self.sent_rows)],
            self.received_rows,
            self.sent_rows,
            group=self.group,
            async_op=True,
        )
        if not self.arranged:
            # Arrange what arrives by expert, while the rows travel.
            here = self._everyone[:, self.group.rank() * self.experts_here :][:, : self.experts_here]
            self.received, self.ends = compiled_for_any_rows(order_by_expert)(here, self.length)
            self.arranged = True
        work.wait()
        return gather(arrived, self.received)

    def from_experts(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to move rows back, (n, hidden) -> (tokens x k, hidden), 0 for dropped choices; return what waits for them."""
        if self.ranks == 1:
            if self.drops:
                behind = torch.arange(rows.shape[0], device=rows.device) >= self.ends[-1]
                rows = rows.masked_fill(behind[:, None], 0)
            return lambda: rows
        leaving = spread(rows[: self.arriving], self.received[: self.arriving, None])
        back, sent = rows.new_empty(self.places.numel(), rows.shape[1]), sum(self.sent_rows)
        back[sent:] = 0
        work = dist.all_to_all_single(back[:sent], leaving, self.sent_rows, self.received_rows, group=self.group, async_op=True)
        return partial(_arrived, work, back, leaving)


def _arrived(work: dist.Work, back: Tensor, _leaving: Tensor) -> Tensor:
    """Wait for rows, and return them. What leaves is read until then."""
    work.wait()
    return back


# One rank's experts.


def swiglu(joint: Tensor) -> Tensor:
    """silu(gate) x up: (n, 2 x ffn), gate before up -> (n, ffn)."""
    gate, up = joint.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def swiglu_gradient(gradient: Tensor, joint: Tensor, gate_gradient: Tensor, up_gradient: Tensor) -> None:
    """Write the gradients of both halves."""
    for out, value in zip((gate_gradient, up_gradient), swiglu_gradients(gradient, joint), strict=True):
        out.copy_(value)


def swiglu_gradients(gradient: Tensor, joint: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up projection in fp32, each of the shape of `gradient`."""
    gate, up = (half.float() for half in joint.chunk(2, dim=-1))
    sigmoid = torch.sigmoid(gate)
    return gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), gradient * gate * sigmoid


class RoutedExperts(torch.autograd.Function):
    """The exchange and the experts, from the tokens of this rank to the results for them."""

    @staticmethod
    def forward(ctx: Any, exchange: "ExpertExchange", hidden: Tensor, weights: Tensor, *matrices: Parameter) -> Tensor:
        """Send rows, (tokens, hidden), to their experts, compute, and add up what comes back, times weights, (tokens, k), fp32.

        Matrices: gate above up projection, (experts here, 2 x ffn, hidden), and down projection, (experts here, hidden, ffn).
        """
        up, down = matrices
        rows = exchange.to_experts(spread(hidden, exchange.places))
        joint = grouped_matmul(rows, up.transpose(-2, -1), exchange.ends)
        activated = compiled_for_any_rows(swiglu)(joint)
        results = exchange.from_experts(grouped_matmul(activated, down.transpose(-2, -1), exchange.ends))()
        ctx.exchange = exchange
        ctx.save_for_backward(weights, up, down, rows, joint, activated, results)
        return add_up(results, exchange.places, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Send gradients the same way, and compute those of the weights while the others travel back."""
        weights, up, down, rows, joint, activated, results = ctx.saved_tensors
        exchange = ctx.exchange
        out = exchange.to_experts(spread(gradient, exchange.places, weights))
        of_activated = grouped_matmul(out, down, exchange.ends)
        of_joint = torch.empty_like(joint)
        compiled_for_any_rows(swiglu_gradient)(of_activated, joint, *of_joint.chunk(2, dim=-1))
        returning = exchange.from_experts(grouped_matmul(of_joint, up, exchange.ends))
        # A transposed gradient and plain rows need no alignment of the ends. An expert without rows gets zeros.
        of_down = _add_gradient(down, grouped_matmul(out.t(), activated, exchange.ends))
        of_up = _add_gradient(up, grouped_matmul(of_joint.t(), rows, exchange.ends))
        of_weights = weights_gradient(gradient, results, exchange.places)
        return None, add_up(returning(), exchange.places), of_weights, of_up, of_down


def _add_gradient(weight: Parameter, gradient: Tensor) -> Tensor:
    """Return a gradient for autograd, after adding it to the fp32 buffer if Megatron has one; then nobody reads it again."""
    own = gradient.to(weight.dtype)
    total = getattr(weight, "main_grad", None)
    if getattr(weight, "accumulates", False) and total is not None:
        add_gradient(total, own, overwrite=claim_first_gradient(weight))
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return own


class ExpertWeights(torch.nn.Module):
    """One weight of each expert of this rank, shape (experts here, out, in), without values yet (_initialize in model.py)."""

    def __init__(self, config: TransformerConfig, outputs: int, inputs: int) -> None:
        super().__init__()
        here = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        self.weight = Parameter(torch.empty(here, outputs, inputs, dtype=config.params_dtype, device=device))
        if config.gradient_accumulation_fusion:
            let_accumulate(self.weight)
        # Other ranks of the replica may have other experts, or other tokens for the same ones.
        spread_out = config.expert_model_parallel_size > 1 or config.tensor_model_parallel_size > 1
        self.weight.allreduce = not spread_out  # type: ignore[attr-defined]
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self) -> Parameter:
        """Return the weight. Called as a module, so that hooks which wait for gathered weights fire."""
        return self.weight


class Experts(torch.nn.Module):
    """The experts of this rank, gated, without biases."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.linear_fc1 = ExpertWeights(config, 2 * width, hidden)
        self.linear_fc2 = ExpertWeights(config, hidden, width)


class ExpertsLayer(MegatronModule):  # type: ignore[misc]
    """A router and its experts, in place of Megatron's MLP.

    `shared` are the linear modules of the experts that every token passes, and `feed_forward` is the class of those together.
    """

    def __init__(self, config: TransformerConfig, shared: MLPSubmodules, feed_forward: type[MLP], **_: Any) -> None:
        super().__init__(config=config)
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared_experts: MLP | None = None
        if width := config.moe_shared_expert_intermediate_size:
            own = copy(config)
            own.ffn_hidden_size = width
            group = parallel_state.get_tensor_model_parallel_group()
            self.shared_experts = feed_forward(own, shared, ffn_hidden_size=width, tp_group=group)
        self.recomputed = set(config.recompute_modules) if config.recompute_granularity == "selective" else set()
        self.routing_counts = RoutingCounts()

    def set_layer_number(self, layer_number: int) -> None:
        """Tell the router, as Megatron asks."""
        self.router.set_layer_number(layer_number)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Pass each token through its experts; shape (tokens of this rank, sequences, hidden) in and out."""
        if "moe" in self.recomputed:
            return checkpoint(self._through_experts, False, hidden), None
        return self._through_experts(hidden), None

    def _through_experts(self, hidden: Tensor) -> Tensor:
        group = parallel_state.get_expert_model_parallel_group()
        with torch.profiler.record_function("moe_router"):
            routing = self.router(hidden)
            exchange = ExpertExchange(routing, group, self.experts.linear_fc1.weight.shape[0])
        self.routing_counts.note(routing.counts, routing.places.numel())
        shared = None
        if self.shared_experts is not None and "shared_experts" in self.recomputed:
            shared = checkpoint(self.shared_experts, False, hidden)[0]
        elif self.shared_experts is not None:
            shared = self.shared_experts(hidden)[0]
        matrices = self.experts.linear_fc1(), self.experts.linear_fc2()
        out = RoutedExperts.apply(exchange, hidden.flatten(0, 1), routing.weights, *matrices).view_as(hidden)  # type: ignore[no-untyped-call]
        return out if shared is None else out + shared  # type: ignore[no-any-return]
