"""Output layer and cross-entropy in one, chunk by chunk, so that the logits of a micro-batch never exist as a whole.

Each chunk's logits, losses and at once the gradient by the logits (softmax minus one-hot) are computed and multiplied into the
gradients of hidden states and weight, as in Liger Kernel (arXiv:2410.10989), over a vocabulary that tensor ranks share. The
backward pass scales them. The weight's gradient goes straight into Megatron's fp32 buffer where the scale is known beforehand
(one over the micro-batches of a step); the backward pass then checks, on the device, that it was the right one.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn import Parameter

from tprimat.megatron import compat
from tprimat.megatron.compat import compiled
from tprimat.megatron.wgrad import accumulate_wgrad, claim_first_gradient, let_accumulate

CHUNK_TOKENS = 2048
"""Enough rows for a matrix product at full speed, and few enough that their logits are small."""


class ChunkedLossModel(GPTModel):  # type: ignore[misc]
    """GPTModel whose loss is a mean over tokens, computed without whole logits. Without labels it returns logits."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.micro_batches: int | None = None
        """Number in the current step, over which the schedule averages losses; None: unknown."""
        self._skip_logits = False
        # A tied weight gets a second gradient, from the embedding.
        self.accumulates = self.config.gradient_accumulation_fusion and not self.share_embeddings_and_output_weights
        if self.post_process:
            if self.accumulates:
                let_accumulate(self.output_layer.weight)
            self._logits = self.output_layer.forward
            self.output_layer.forward = self._hidden_or_logits

    def forward(self, *arguments: Any, labels: Tensor | None = None, **options: Any) -> Tensor:
        """As GPTModel's; the last stage returns a scalar where labels are given."""
        self._skip_logits = labels is not None
        return super().forward(*arguments, labels=labels, **options)  # type: ignore[no-any-return]

    def _hidden_or_logits(self, hidden: Tensor, **options: Any) -> tuple[Tensor, None]:
        # Still called as a module, so that hooks which wait for gathered weights fire.
        return (hidden, None) if self._skip_logits else self._logits(hidden, **options)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy of labels, (sequences, tokens).

        `logits` are the hidden states here, (tokens of this rank, sequences, hidden).
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
        micro_batches = self.micro_batches if direct else None
        return LinearCrossEntropy.apply(flat, weight, targets, micro_batches)  # type: ignore[no-any-return, no-untyped-call]


class LinearCrossEntropy(torch.autograd.Function):
    """mean(cross_entropy(hidden @ weight.T, targets)) over a vocabulary that tensor ranks share."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Parameter, targets: Tensor, micro_batches: int | None) -> Tensor:
        """Compute losses and both gradients, chunk by chunk.

        `hidden` is (n, hidden), all tokens on every tensor rank, `weight` (vocabulary of this rank, hidden), and `targets` are
        token ids of the whole vocabulary, (n,). `micro_batches`: over which the loss will be averaged, if the weight's gradient
        may go straight into its buffer.
        """
        tokens = hidden.shape[0]
        first_word = weight.shape[0] * parallel_state.get_tensor_model_parallel_rank()
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden)
        if micro_batches:
            weight_grad, factor = weight.main_grad, 1 / (tokens * micro_batches)  # type: ignore[attr-defined]
        else:
            weight_grad, factor = torch.empty(weight.shape, dtype=torch.float32, device=weight.device), 1.0
        overwrite = claim_first_gradient(weight) if micro_batches else True
        for start in range(0, tokens, CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            places = targets[rows] - first_word
            logits = F.linear(hidden[rows], weight)
            losses, log_sums = _losses(logits, places)
            total += losses
            gradient = compiled(loss_gradient)(logits, places, log_sums)
            hidden_grad[rows] = gradient @ weight
            accumulate_wgrad(weight_grad, gradient, hidden[rows], factor, overwrite=overwrite and start == 0)
        ctx.tokens, ctx.micro_batches = tokens, micro_batches
        ctx.save_for_backward(hidden_grad, weight, *(() if micro_batches else (weight_grad,)))
        return total / tokens

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients that the forward pass computed."""
        hidden_grad, weight, *weight_grad = ctx.saved_tensors
        scale = upstream / ctx.tokens
        if ctx.micro_batches:
            # Checked on the device, so that nothing waits for it.
            compat.assert_on_device(torch.isclose(upstream * ctx.micro_batches, torch.ones_like(upstream)))
            weight.grad_added_to_main_grad = True
            weights = torch.empty_like(weight)
        else:
            weights = (weight_grad[0] * scale).to(weight.dtype)
        # In fp32, since torch would round the scale itself to bf16 to multiply a bf16 tensor with it.
        return (hidden_grad.float() * scale).to(hidden_grad.dtype), weights, None, None


def _losses(logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of a chunk's losses, and of each row the logarithm of its sum of exponentials over all ranks."""
    group, ranks = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_tensor_model_parallel_world_size()
    largest = compiled(_largest)(logits)
    if ranks > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = compiled(_sums)(logits, places, largest)
    if ranks > 1:
        dist.all_reduce(sums, group=group)
    return compiled(_finish)(largest, sums)  # type: ignore[no-any-return]


def _largest(logits: Tensor) -> Tensor:
    return logits.max(dim=-1).values.float()


def _sums(logits: Tensor, places: Tensor, largest: Tensor) -> Tensor:
    """Shape (2, rows): sum of exponentials, and the target's shifted logit where it is this rank's."""
    shifted = logits.float() - largest[:, None]
    mine = (places >= 0) & (places < logits.shape[1])
    target = shifted.gather(1, places.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return torch.stack([shifted.exp().sum(dim=-1), torch.where(mine, target, 0.0)])


def _finish(largest: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    log_sum = sums[0].log()
    return (log_sum - sums[1]).sum(), largest + log_sum


def loss_gradient(logits: Tensor, places: Tensor, log_sums: Tensor) -> Tensor:
    """Return the gradient of the sum of losses by the logits of this rank: softmax minus one-hot, in the logits' dtype.

    Logits are (rows, words of this rank); `places`, (rows,), are the targets as columns of this rank, and `log_sums`, (rows,),
    the logarithms of the rows' sums of exponentials over all ranks, fp32.
    """
    probabilities = (logits.float() - log_sums[:, None]).exp()
    is_target = places[:, None] == torch.arange(logits.shape[1], device=logits.device)
    return (probabilities - is_target.float()).to(logits.dtype)
