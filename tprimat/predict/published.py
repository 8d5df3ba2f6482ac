"""Predictions of training runs that others published, from data sheets and published rates alone."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from tprimat.core.accelerators import Accelerator, find_accelerator, peak_dense_flops
from tprimat.core.flops import flop_per_token
from tprimat.core.models import model_shape
from tprimat.core.published import PublishedResult, rebase, results
from tprimat.plan.schema import Layout
from tprimat.predict.memory import predict_memory
from tprimat.predict.rates import published_rates
from tprimat.predict.search import short_ends
from tprimat.predict.time import predict_time
from tprimat.predict.workload import FSDP, MEGATRON_TUNED, Recompute, Workload

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


def published_errors(accelerator: Accelerator, *, experts: bool, several_nodes: bool) -> Sequence[float]:
    """Return the relative errors of predicted steps: of published results on an accelerator, with experts or without.

    With several nodes only of those that ran on more than one.
    """
    alike = {
        result.name
        for result in results()
        if result.shape
        and find_accelerator(result.accelerator) is accelerator
        and (model_shape(result.shape).experts is not None) == experts
        and (not several_nodes or (result.gpus or 0) > accelerator.node_gpus)
    }
    return [score.error for score in score_published() if score.name in alike]


def published_like(shape: str, accelerator: str, precision: str) -> list[tuple[PublishedResult, PublishedScore]]:
    """Return what others published of a model on an accelerator in a dtype, by numbers of GPUs, each with its score."""
    scores = {score.name: score for score in score_published()}
    found = [
        (result, scores[result.name])
        for result in results()
        if result.name in scores
        and (result.shape, result.dtype) == (shape, precision)
        and (known := find_accelerator(result.accelerator)) is not None
        and known.name == accelerator
    ]
    return sorted(found, key=lambda pair: pair[0].gpus or 0)


def _score(result: PublishedResult, accelerator: Accelerator) -> PublishedScore | None:
    workloads, measured = list(_workloads(result)), _tokens_per_second(result)
    if not workloads or measured is None:
        return None
    peak = peak_dense_flops(result.accelerator, result.dtype) or math.inf
    if measured * flop_per_token(workloads[0].shape, workloads[0].sequence_tokens) >= peak:
        return None  # the source contradicts itself
    rates = published_rates(accelerator, min(GPUS_OF_A_NODE, result.gpus or GPUS_OF_A_NODE))
    fitting = [work for work in workloads if predict_memory(work).allocated_bytes < accelerator.memory_bytes] or workloads
    predicted = max(predict_time(work, rates).tokens_per_second_per_gpu for work in fitting)
    return PublishedScore(name=result.name, measured=1 / measured, predicted=1 / predicted)


def _tokens_per_second(result: PublishedResult) -> float | None:
    """Return tokens/s/GPU as printed, else from the printed FLOP/s or MFU."""
    if result.tokens_per_second_per_gpu:
        return result.tokens_per_second_per_gpu
    causal = rebase(result).flops_per_second_per_gpu
    if causal is None or result.shape is None or result.sequence_tokens is None:
        return None
    return causal / flop_per_token(model_shape(result.shape), result.sequence_tokens)


def _workloads(result: PublishedResult) -> Iterable[Workload]:
    stated = (result.shape, result.gpus, result.sequence_tokens, result.global_batch_sequences, result.tensor_parallel)
    if any(value is None for value in stated) or result.dtype not in {"bf16", "fp8"}:
        return
    shape, gpus = model_shape(result.shape or ""), result.gpus or 1
    if shape.experts and result.expert_parallel is None:
        return
    tensor, pipeline, context = result.tensor_parallel or 1, result.pipeline_parallel or 1, result.context_parallel or 1
    data = gpus // (tensor * pipeline * context)
    share = (result.global_batch_sequences or 1) // max(1, data)
    expert = result.expert_parallel or 1
    layout = Layout(tensor=tensor, pipeline=pipeline, context=context, expert=expert, data=data, sequence_parallel=tensor > 1)
    chunks: list[int | None] = [result.virtual_pipeline]
    if pipeline > 1 and result.virtual_pipeline is None:
        chunks += [count for count in (2, 4, 6, 7, 8) if shape.layers // pipeline % count == 0]
    layers = result.recomputed_layers
    again = Recompute(granularity="full", method="block", layers=layers) if layers else Recompute()
    for micro in [result.micro_batch_sequences] if result.micro_batch_sequences else [1, 2, 4]:
        if micro is None or data < 1 or share % micro:
            continue
        for count in chunks:
            yield Workload(
                shape=shape,
                layout=replace(layout, virtual_pipeline=count),
                micro_batch=micro,
                accumulation_steps=share // micro,
                sequence_tokens=result.sequence_tokens or 1,
                implementation=FSDP if result.fully_sharded else MEGATRON_TUNED,
                recompute=again,
                expert_tensor=1 if shape.experts else None,
                chunk_layers=short_ends(shape.layers, pipeline * (count or 1)) if pipeline > 1 else None,
                precision="fp8" if result.dtype == "fp8" else "bf16",
            )
