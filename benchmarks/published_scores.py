"""Predictions of training runs that others published, from data sheets and published rates alone."""

import math
from dataclasses import dataclass
from functools import cache

from tprimat.core.accelerators import Accelerator, find_accelerator, peak_dense_flops
from tprimat.core.flops import flop_per_token
from tprimat.core.published import PublishedResult, rebase, results
from tprimat.predict import predict
from tprimat.runner.against import published_workloads

GPUS_OF_A_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedScore:
    """What was measured, in seconds, and what is predicted for it."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative, signed: 0.05 is predicted 5 % too high."""
        return self.predicted / self.measured - 1


@cache
def score_published() -> tuple[PublishedScore, ...]:
    """Score each published throughput whose model, accelerator, batch and layout are stated, in seconds per token and GPU.

    Of a micro-batch or a number of model chunks that the source leaves out, the fastest that fits counts.
    """
    scores = (_score(result, accelerator) for result in results() if (accelerator := find_accelerator(result.accelerator)))
    return tuple(score for score in scores if score is not None)


def _score(result: PublishedResult, accelerator: Accelerator) -> PublishedScore | None:
    workloads, measured = list(published_workloads(result)), _tokens_per_second(result)
    if not workloads or measured is None:
        return None
    peak = peak_dense_flops(result.accelerator, result.workload.matmul_dtype) or math.inf
    if measured * flop_per_token(workloads[0].shape, workloads[0].sequence_tokens) >= peak:
        return None  # the source contradicts itself
    node = min(GPUS_OF_A_NODE, result.gpus or GPUS_OF_A_NODE)
    predictions = [predict(work, accelerator, node) for work in workloads]
    fitting = [one for one in predictions if one.memory.allocated_bytes < accelerator.memory_bytes] or predictions
    predicted = max(one.time.tokens_per_second_per_gpu for one in fitting)
    return PublishedScore(name=result.name, measured=1 / measured, predicted=1 / predicted)


def _tokens_per_second(result: PublishedResult) -> float | None:
    """Return tokens/s/GPU as printed, else from the printed FLOP/s or MFU."""
    if result.tokens_per_second_per_gpu:
        return result.tokens_per_second_per_gpu
    causal = rebase(result).flops_per_second_per_gpu
    shape, tokens = result.workload.shape, result.workload.sequence_tokens
    return None if causal is None or shape is None or tokens is None else causal / flop_per_token(shape, tokens)
