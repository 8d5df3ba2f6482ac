"""Find the fastest layout of a model on some GPUs: every legal one, whether it fits, and how fast it should be."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tprimat.core.accelerators import find_accelerator
from tprimat.core.errors import UserError
from tprimat.core.implementations import Implementation
from tprimat.core.models import ModelShape, divisors, valid_tensor_degrees
from tprimat.core.workload import KEPT_FREE, FullWorkload, Layout, RecomputeGranularity
from tprimat.predict.calibration import Expected, expected
from tprimat.predict.memory import Fit, MemoryPrediction, predict_memory
from tprimat.predict.rates import Rates
from tprimat.predict.time import TimePrediction, predict_time

RECOMPUTE: tuple[RecomputeGranularity, ...] = ("none", "selective", "full")
MOST_CHUNKS = 8
"""Virtual stages: more only add messages."""
MOST_MISSING = 3
"""Layers that the first and the last model chunk have less than the others."""
MOST_MICRO_BATCH = 16
MOST_CONTEXT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutQuestion:
    """What to find a layout for."""

    work: FullWorkload
    """Model, batch, dtype and code; what else it says of the layout, the micro-batch and recomputation is not looked at."""
    gpus: int
    gpus_per_node: int
    memory_bytes: int
    """Of one accelerator, as a program may use it."""
    engine: str | None = None
    """What --engine calls it; None: none."""
    unstarted: UserError | None = None
    """Why TPrimat does not start the fastest layout; None: it does."""
    equal_stages: bool
    """Every pipeline stage must have the same number of layers, as TPrimat's own plans require; False: one more or less, or up to
    MOST_MISSING fewer at the ends."""
    refusal: "Callable[[LayoutQuestion, FullWorkload], UserError | None] | None" = None
    """Why the engine cannot run a workload; None: no engine is asked."""
    as_run: "Callable[[LayoutQuestion, FullWorkload], Implementation] | None" = None
    """How the engine's layers run a workload; None: as those of `work`."""
    sharded: Implementation | None = None
    """What runs layouts whose replicas share all weights, besides the others; None: nothing does."""
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Layers whose memory and time were predicted for a layout: others have the same."""

    def refused(self, workload: FullWorkload) -> UserError | None:
        """Return why the engine cannot run a workload; None if it can."""
        return None if self.refusal is None else self.refusal(self, workload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One legal layout with its predictions."""

    workload: FullWorkload
    memory: MemoryPrediction
    time: TimePrediction | None
    """None where it does not fit."""
    missing_bytes: int
    """What it lacks for a promise that it runs; 0: it fits."""
    fit: Fit
    expected: Expected | None = None
    """The step as it is expected; None where there is no prediction, or the accelerator is not in the table."""

    @property
    def step_seconds(self) -> float:
        """The expected step, else the predicted one; infinite where there is neither."""
        if self.expected is not None:
            return self.expected.step_seconds
        return math.inf if self.time is None else self.time.step_seconds

    @property
    def degrees(self) -> tuple[int, ...]:
        """TP, PP, CP, EP, and whether weights are sharded; variants differ in model chunks, micro-batch or recomputation."""
        layout = self.workload.layout
        return layout.tensor, layout.pipeline, layout.context, layout.expert, int(self.workload.code.shards_weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All candidates: those that fit, fastest first; and the others, least missing first."""

    question: LayoutQuestion
    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: tuple[str, ...] = ()
    """Why the engine cannot run the others, most frequent first."""

    def layouts(self) -> list[Candidate]:
        """Return the fastest variant of each layout that fits, fastest first, without more context ranks that change nothing."""
        fastest: dict[tuple[object, ...], Candidate] = {}
        for candidate in _first_of_each(self.fitting):
            tensor, pipeline, _, expert, sharded = candidate.degrees
            fastest.setdefault((tensor, pipeline, expert, sharded, f"{candidate.step_seconds:.3e}"), candidate)
        return list(fastest.values())

    def nearly(self) -> list[Candidate]:
        """Return the smallest variant of each layout of which none fits, least missing first."""
        known = {candidate.degrees for candidate in self.fitting}
        return [candidate for candidate in _first_of_each(self.too_large) if candidate.degrees not in known]


def _first_of_each(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    first: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.degrees, candidate)
    return list(first.values())


def search(question: LayoutQuestion, rates: Rates) -> Answer:
    """Predict every legal layout and micro-batch with the least recomputation that fits, up to the first that never does.

    A larger micro-batch needs at least as much recomputation as a smaller one.
    """
    candidates: list[Candidate] = []
    refused: Counter[str] = Counter()
    for kind in with_sharded(replace(question, known={})):
        for layout in layouts(kind):
            placed, granularities = _placed(kind, layout), RECOMPUTE
            for micro in _micro_batches(kind, layout):
                variants = _variants(kind, placed, micro, refused, granularities)
                tried = list(_least_recomputing(kind, variants, rates))
                candidates += tried
                if tried and tried[-1].missing_bytes and tried[-1].workload.recompute == "full":
                    break
                if tried:
                    granularities = RECOMPUTE[RECOMPUTE.index(tried[-1].workload.recompute) :]
    fitting = sorted((one for one in candidates if not one.missing_bytes), key=lambda one: one.step_seconds)
    too_large = sorted((one for one in candidates if one.missing_bytes), key=lambda one: one.missing_bytes)
    why = tuple(reason for reason, _ in refused.most_common())
    return Answer(question=question, fitting=tuple(fitting), too_large=tuple(too_large), refused=why)


def _least_recomputing(question: LayoutQuestion, variants: Iterable[FullWorkload], rates: Rates) -> Iterator[Candidate]:
    """Yield variants with more and more recomputation until one fits, and with as few layers as do under full."""
    for workload in variants:
        yield (candidate := _candidate(question, workload, rates))
        if not candidate.missing_bytes:
            if workload.recompute == "full" and (fewer := _fewest_recomputed(question, workload)):
                yield _candidate(question, fewer, rates)
            return


def _candidate(question: LayoutQuestion, workload: FullWorkload, rates: Rates) -> Candidate:
    memory = predict_memory(workload, question.known)
    if missing := memory.missing_bytes(question.memory_bytes):
        fit = memory.fit(question.memory_bytes)
        return Candidate(workload=workload, memory=memory, time=None, missing_bytes=missing, fit=fit)
    return _timed(workload, memory, rates, question.known)


def _timed(workload: FullWorkload, memory: MemoryPrediction, rates: Rates, known: dict[Any, Any] | None = None) -> Candidate:
    """Return a candidate that fits with its time."""
    known = {} if known is None else known
    time, alike = predict_time(workload, rates, known), ("usual", workload.layout.expert, workload.code.name)
    if alike not in known:
        accelerator = find_accelerator(rates.accelerator)
        known[alike] = accelerator and expected(workload, accelerator, rates.gpus_per_node, measured=rates.measured)
    step = known[alike] and known[alike].of(time.step_seconds, time.slow_host_seconds)
    return Candidate(workload=workload, memory=memory, time=time, missing_bytes=0, fit="fits", expected=step)


def with_sharded(question: LayoutQuestion) -> list[LayoutQuestion]:
    """Return a question, and the same one to what shards all weights, if anything does."""
    work = replace(question.work, implementation=question.sharded)
    return [question, replace(question, work=work, sharded=None)] if question.sharded else [question]


def other_routing(candidate: Candidate, rates: Rates) -> Candidate | None:
    """Return a layout of a mixture that is spread over ranks under the other routing; None where that makes no difference."""
    work = candidate.workload
    if not work.shape.experts or work.layout.expert == 1 or work.routing not in {"natural", "balanced"}:
        return None
    other = replace(work, routing="balanced" if work.routing == "natural" else "natural")
    return _timed(other, candidate.memory, rates)


def _fewest_recomputed(question: LayoutQuestion, workload: FullWorkload) -> FullWorkload | None:
    """Return a workload that recomputes all layers with as few of each chunk as fit; None if that is all, or the engine cannot.

    As when the largest micro-batch is searched for, a part of the memory stays free.
    """
    layout = workload.layout
    chunk = question.work.shape.layers // layout.chunks

    def first(layers: int) -> FullWorkload:
        return workload.changed(recompute="full", recompute_layers=layers)

    counts, room = range(1, chunk), question.memory_bytes * (1 - KEPT_FREE)
    fewest = bisect_left(counts, True, key=lambda layers: predict_memory(first(layers), question.known).device_bytes <= room)
    if fewest == len(counts) or question.refused(first(counts[fewest])):
        return None
    return first(counts[fewest])


def workloads(question: LayoutQuestion) -> Iterator[FullWorkload]:
    """Yield every legal layout with every micro-batch and every kind of recomputation that the engine can run.

    Tensor ranks share a node. Of the recomputations that save memory, full is tried with one layer at a time.
    """
    for layout in layouts(question):
        for micro in _micro_batches(question, layout):
            yield from _variants(question, _placed(question, layout), micro, Counter(), RECOMPUTE)


def _variants(
    question: LayoutQuestion,
    placed: FullWorkload,
    micro: int,
    refused: "Counter[str]",
    granularities: Iterable[RecomputeGranularity],
) -> Iterator[FullWorkload]:
    """Yield a micro-batch with each of some recomputations that the engine can run; count why it cannot run the others."""
    for granularity in granularities:
        workload = placed.changed(micro_batch_sequences=micro, recompute=granularity)
        why = question.refused(workload)
        if why is None:
            yield workload if question.as_run is None else workload.changed(implementation=question.as_run(question, workload))
        else:
            refused[why.what] += 1


def smallest_that_fits(question: LayoutQuestion, rates: Rates) -> Candidate | None:
    """Return the fastest layout that fits with micro-batches of one sequence and full recomputation; None where none does."""
    fitting = []
    for kind in with_sharded(question):
        for layout in (one for one in layouts(kind) if one.virtual_pipeline is None):
            workload = _placed(kind, layout).changed(micro_batch_sequences=1, recompute="full")
            memory = predict_memory(workload)
            if not memory.missing_bytes(question.memory_bytes) and kind.refused(workload) is None:
                fitting.append(_timed(workload, memory, rates))
    return min(fitting, key=lambda candidate: candidate.step_seconds, default=None)


def _placed(question: LayoutQuestion, layout: Layout) -> FullWorkload:
    """Return a question's work in a layout, as all its micro-batches and recomputations have it."""
    work, chunks = question.work, layout.chunks
    placed = work.changed(
        **layout.facts,
        expert_tensor_parallel=1 if work.shape.experts else None,
        chunk_layers=None if question.equal_stages else short_ends(work.shape.layers, chunks) if chunks > 1 else None,
    )
    assert placed.layout == layout  # is kept, as is what its copies derive from it
    return placed


def layouts(question: LayoutQuestion) -> Iterator[Layout]:
    """Yield every way to divide the model and the batch over the GPUs."""
    shape, gpus, code = question.work.shape, question.gpus, question.work.code
    for tensor in _tensor_degrees(shape):
        if gpus % tensor or question.gpus_per_node % tensor:
            continue
        for pipeline in divisors(gpus // tensor):
            if code.divides_over_replicas_alone and (tensor * pipeline > 1 or shape.experts):
                continue
            if code.shards_weights and pipeline > 1:
                continue  # weights would be gathered anew for each of a stage's micro-batches
            if pipeline > shape.layers or (question.equal_stages and shape.layers % pipeline):
                continue
            for context in divisors(gpus // tensor // pipeline):
                if context > MOST_CONTEXT or question.work.sequence_tokens % (min(context, 2) * context * tensor):
                    continue
                data = gpus // (tensor * pipeline * context)
                if question.work.global_batch_sequences % data:
                    continue
                whole = Layout(tensor=tensor, pipeline=pipeline, context=context, data=data, sequence_parallel=tensor > 1)
                for chunks in _chunks(question, pipeline):
                    for expert in divisors(math.gcd(shape.experts, tensor * context * data)) if shape.experts else [1]:
                        yield replace(whole, virtual_pipeline=chunks, expert=expert)


def _tensor_degrees(shape: ModelShape) -> list[int]:
    if shape.kv_lora_rank is not None:
        degrees = [degree for degree in divisors(shape.heads) if not shape.ffn % degree]
    else:
        degrees = valid_tensor_degrees(shape)
    return [degree for degree in degrees if not (shape.expert_ffn or 0) % degree]


def _chunks(question: LayoutQuestion, pipeline: int) -> list[int | None]:
    if pipeline == 1:
        return [None]
    layers = question.work.shape.layers
    counts = (chunks for chunks in range(2, MOST_CHUNKS + 1) if chunks * pipeline <= layers + MOST_MISSING)
    uneven = not question.equal_stages
    return [None, *(n for n in counts if layers % (pipeline * n) == 0 or (uneven and short_ends(layers, pipeline * n)))]


def short_ends(layers: int, chunks: int) -> tuple[int, ...] | None:
    """Return the layers of model chunks that are equal but for the first and the last; None where that is not possible.

    Embedding and output take the place of the layers that are missing there, as in NVIDIA's recipes for the 126 layers of Llama
    3.1 405B (account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split of Megatron-Core) and the 61 of
    DeepSeek-V3 (pipeline_model_parallel_layout).
    """
    each = -(-layers // chunks)
    missing = each * chunks - layers
    if not 0 < missing <= min(MOST_MISSING, 2 * each):
        return None
    first = missing // 2
    return (each - first, *[each] * (chunks - 2), each - (missing - first))


def _micro_batches(question: LayoutQuestion, layout: Layout) -> Iterator[int]:
    """Yield micro-batches that divide the batch; the interleaved schedule runs in rounds of one a stage."""
    share = question.work.global_batch_sequences // layout.data
    size = 1
    while size <= min(share, MOST_MICRO_BATCH):
        if share % size == 0 and not (layout.virtual_pipeline and share // size % layout.pipeline):
            yield size
        size *= 2
