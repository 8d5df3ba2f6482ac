"""Output layer and cross-entropy in one, chunk by chunk: the logits of a micro-batch never exist as a whole.

At 8,192 tokens and 128,256 words the logits, their fp32 copy and their gradient would take 10 GB. Here a chunk's logits
are made, turned into losses and at once into their gradient, and forgotten; because the loss is a mean, the incoming
gradient is one number, so the gradients of hidden states and weight can be taken in the forward pass and scaled later
(the idea of Liger Kernel's fused linear cross-entropy, arXiv:2410.10989, here over a vocabulary split by tensor ranks).
Where that number is known beforehand, one over the micro-batches of a step, the weight's gradient goes straight into
Megatron's fp32 buffer, and the backward pass checks that the number was right.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn import Parameter

from tprimat.megatron.compilation import compiled
from tprimat.megatron.wgrad import accumulate_product, first_of_the_step

CHUNK_TOKENS = 2048
"""Enough rows for a full-speed matrix product, few enough that their logits are small beside a layer's activations."""


class StreamedLossModel(GPTModel):  # type: ignore[misc]
    """GPTModel whose loss is the mean over the micro-batch's tokens, computed without whole logits. Without labels: logits."""

    def __init__(self, *arguments: Any, compile_regions: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.compile_regions = compile_regions
        self.micro_batches: int | None = None
        """Of the step that runs, over which the schedule averages losses; None: not known."""
        self._streaming = False
        if self.post_process:
            self._logits = self.output_layer.forward
            self.output_layer.forward = self._hidden_or_logits

    def forward(self, *arguments: Any, labels: Tensor | None = None, **options: Any) -> Tensor:
        """As GPTModel's; the last stage returns a scalar where labels are given."""
        self._streaming = labels is not None
        return super().forward(*arguments, labels=labels, **options)  # type: ignore[no-any-return]

    @property
    def accumulates(self) -> bool:
        """Whether the weight's gradient may go into its buffer at once: a tied weight gets a second one from the embedding."""
        return bool(self.config.gradient_accumulation_fusion and not self.share_embeddings_and_output_weights)

    def _hidden_or_logits(self, hidden: Tensor, **options: Any) -> tuple[Tensor, None]:
        # Still called as a module, so that hooks which wait for gathered weights fire.
        return (hidden, None) if self._streaming else self._logits(hidden, **options)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Mean cross-entropy.

        Args:
            labels: shape (sequences, tokens).
            logits: the hidden states, shape (tokens of this rank, sequences, hidden).
        """
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(logits, tensor_parallel_output_grad=True)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(logits)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        direct = self.accumulates and hasattr(weight, "main_grad")
        flat = hidden.reshape(-1, hidden.shape[-1])
        targets = labels.transpose(0, 1).reshape(-1)
        way = Way(self.compile_regions, self.micro_batches if direct else None)
        return LinearCrossEntropy.apply(flat, weight, targets, way)  # type: ignore[no-any-return, no-untyped-call]


def announce_micro_batches(chunk: torch.nn.Module, number: int) -> None:
    """Tell a streamed loss in a chunk of the model over how many micro-batches the coming step averages."""
    for part in chunk.modules():
        if isinstance(part, StreamedLossModel):
            part.micro_batches = number


class Way(NamedTuple):
    """How losses and gradients are taken."""

    compile_regions: bool
    """Whether the element-wise parts are compiled."""
    micro_batches: int | None
    """Over which the loss will be averaged, if the weight's gradient may go into its buffer at once."""


class LinearCrossEntropy(torch.autograd.Function):
    """mean(cross_entropy(hidden @ weight.T, targets)) over a vocabulary that tensor ranks share."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Parameter, targets: Tensor, way: Way) -> Tensor:
        """Losses and both gradients, chunk by chunk.

        Args:
            ctx: keeps the gradients.
            hidden: shape (n, hidden), all tokens on every tensor rank.
            weight: shape (vocabulary of this rank, hidden).
            targets: shape (n,), token ids of the whole vocabulary.
            way: how.
        """
        tokens, micro_batches = hidden.shape[0], way.micro_batches
        first_word = weight.shape[0] * parallel_state.get_tensor_model_parallel_rank()
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden)
        if micro_batches:
            weight_grad, factor = weight.main_grad, 1 / (tokens * micro_batches)  # type: ignore[attr-defined]
        else:
            weight_grad, factor = torch.empty(weight.shape, dtype=torch.float32, device=weight.device), 1.0
        overwrite = first_of_the_step(weight) if micro_batches else True
        for start in range(0, tokens, CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            logits = hidden[rows] @ weight.t()
            losses, logits_grad = _losses_and_gradient(logits, targets[rows] - first_word, way.compile_regions)
            total += losses
            torch.mm(logits_grad, weight, out=hidden_grad[rows])
            accumulate_product(weight_grad, logits_grad, hidden[rows], factor, overwrite=overwrite and start == 0)
        ctx.tokens, ctx.micro_batches = tokens, micro_batches
        ctx.save_for_backward(hidden_grad, weight, *(() if micro_batches else (weight_grad,)))
        return total / tokens

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what the forward pass has taken."""
        hidden_grad, weight, *weight_grad = ctx.saved_tensors
        scale = upstream / ctx.tokens
        if ctx.micro_batches:
            # Checked on the device, so that nothing waits for it.
            torch._assert_async(torch.isclose(upstream * ctx.micro_batches, torch.ones_like(upstream)))
            weight.grad_added_to_main_grad = True
            weights = torch.empty_like(weight)
        else:
            weights = (weight_grad[0] * scale).to(weight.dtype)
        # In fp32, since torch would round the scale itself to bf16 to multiply a bf16 tensor with it.
        return (hidden_grad.float() * scale).to(hidden_grad.dtype), weights, None, None


def _losses_and_gradient(logits: Tensor, places: Tensor, compile_regions: bool) -> tuple[Tensor, Tensor]:
    """Sum of the chunk's losses, and the gradient of it by the logits of this rank.

    Args:
        logits: shape (rows, words of this rank).
        places: shape (rows,), targets as columns of this rank; outside of them, another rank's.
        compile_regions: whether the element-wise parts are compiled.
    """
    run = compiled if compile_regions else (lambda function: function)
    group, ranks = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_tensor_model_parallel_world_size()
    largest = run(_largest)(logits)
    if ranks > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = run(_sums)(logits, places, largest)
    if ranks > 1:
        dist.all_reduce(sums, group=group)
    return run(_finish)(logits, places, largest, sums)  # type: ignore[no-any-return]


def _largest(logits: Tensor) -> Tensor:
    return logits.max(dim=-1).values.float()


def _sums(logits: Tensor, places: Tensor, largest: Tensor) -> Tensor:
    """Shape (2, rows): sum of exponentials, and the target's shifted logit where it is this rank's."""
    shifted = logits.float() - largest[:, None]
    mine = (places >= 0) & (places < logits.shape[1])
    target = shifted.gather(1, places.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return torch.stack([shifted.exp().sum(dim=-1), torch.where(mine, target, 0.0)])


def _finish(logits: Tensor, places: Tensor, largest: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    log_sum = sums[0].log()
    probabilities = (logits.float() - (largest + log_sum)[:, None]).exp()
    is_target = places[:, None] == torch.arange(logits.shape[1], device=logits.device)
    return (log_sum - sums[1]).sum(), (probabilities - is_target.float()).to(logits.dtype)
