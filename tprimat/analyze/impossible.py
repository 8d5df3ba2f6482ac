"""Runs whose record contradicts itself or physics, from any program: shown with the reason, and not counted."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tprimat.analyze.window import steady_steps
from tprimat.core import units
from tprimat.core.accelerators import find_accelerator
from tprimat.core.flops import parameters
from tprimat.core.models import padded_vocabulary
from tprimat.core.workload import COMPARED
from tprimat.records.benchmark_file import RunResult
from tprimat.records.schema import RunMetrics, RunRecord, StepRecord

TOLERANCE = 0.2
"""Between two figures of one file that should be the same; another choice of warm-up makes a few percent."""
PARAMETER_TOLERANCE = 0.02
"""Frameworks pad the vocabulary differently."""


def contradictions(result: RunResult, metrics: RunMetrics | None) -> tuple[str, ...]:
    """List why a run cannot be what it says; empty where nothing contradicts it."""
    run, steps = result.run, result.steps
    return (
        *_against_evidence(run),
        *_against_arithmetic(run),
        *_memory(run, steps),
        *_steps(run, steps),
        *_tokens(run, steady_steps(steps, metrics.window) if metrics else steps),
        *(_rates(run, metrics) if metrics else ()),
        *_stated_rate(result.stated_tokens_per_second, steps),
    )


def _against_evidence(run: RunRecord) -> Iterator[str]:
    """Compare a record with its own evidence: a file may have been changed since it was written."""
    evidence = run.evidence
    if evidence is None:
        return
    asked, seen = run.workload, evidence.workload
    pairs = [(words, getattr(asked, name), getattr(seen, name)) for name, words in COMPARED.items()]
    pairs += [
        ("GPU count", run.machine.gpus, evidence.world_size),
        ("tokens a step", asked.tokens_per_step, evidence.tokens_per_step),
    ]
    for words, recorded, ran in pairs:
        if recorded is not None and ran is not None and recorded != ran:
            yield f"{words} is {recorded} in the record and {ran} in its evidence"
    if run.ran.shape is not None and evidence.parameters is not None and evidence.source == "running_framework":
        expected = parameters(replace(run.ran.shape, vocabulary=padded_vocabulary(run.ran.shape))).total
        if abs(evidence.parameters / expected - 1) > PARAMETER_TOLERANCE:
            yield f"{evidence.parameters:,} parameters ran, and the recorded shape has {expected:,}"


def _against_arithmetic(run: RunRecord) -> Iterator[str]:
    degrees = (run.ran.tensor_parallel, run.ran.pipeline_parallel, run.ran.data_parallel, run.machine.gpus)
    if None not in degrees:
        tensor, pipeline, data, gpus = (degree or 1 for degree in degrees)
        ranks = tensor * pipeline * data * (run.ran.context_parallel or 1)
        if ranks != gpus:
            yield f"its layout needs {ranks} GPUs, and {gpus} ran"
    whole, micro, data_ranks = run.ran.global_batch_sequences, run.ran.micro_batch_sequences, run.ran.data_parallel
    if whole and micro and data_ranks and whole % (micro * data_ranks):
        yield f"a batch of {whole} sequences is not a multiple of micro-batch {micro} on {data_ranks} replicas"


def _memory(run: RunRecord, steps: Sequence[StepRecord]) -> Iterator[str]:
    """Compare the peak with the memory of a GPU; the resident set of a CPU's process has no such bound."""
    peak, memory = max((step.peak_allocated_bytes or 0 for step in steps), default=0), run.machine.memory_bytes
    if run.machine.platform != "cpu" and memory and peak > (1 + TOLERANCE) * memory:
        yield f"its peak memory is {peak / 2**30:.1f} GiB, and its GPU has {memory / 2**30:.1f} GiB"


def _rates(run: RunRecord, metrics: RunMetrics) -> Iterator[str]:
    """Compare FLOP/s with the accelerator's peak, in its fastest dtype where the dtype is not known; and power with its limit."""
    known, flops = find_accelerator(run.machine.accelerator), metrics.model_flops_per_second_per_gpu
    if metrics.mfu is not None and metrics.mfu.value > 1:
        share = units.percent(metrics.mfu.value, 0)
        yield f"MFU is {share}, which no hardware can reach: model, GPU, dtype, batch or sequence are not what ran"
    if metrics.mfu is None and known and flops and flops.value > (most := max(known.dense_flops.values())):
        yield f"it means {flops.value / 1e12:,.0f} TFLOP/s per GPU, and {known.name} has {most / 1e12:,.0f} in its fastest dtype"
    rate, joules, limit = metrics.tokens_per_second_per_gpu, metrics.joules_per_token, run.machine.power_limit_watts
    if rate and joules and limit and rate.value * joules > (1 + TOLERANCE) * limit:
        yield f"its energy means {rate.value * joules:,.0f} W per GPU, whose limit is {limit:,.0f} W"


def _tokens(run: RunRecord, steps: Sequence[StepRecord]) -> Iterator[str]:
    """Compare the tokens of each step that counts with the batch."""
    batch, length = run.ran.global_batch_sequences or 0, run.ran.sequence_tokens or 0
    other = [step.tokens for step in steps if step.tokens is not None and abs(step.tokens - batch * length) > 1e-6 * step.tokens]
    if batch and length and other:
        yield (
            f"{len(other)} of {len(steps)} steps have {other[0]:,} tokens, and {batch} sequences of {length:,} "
            f"make {batch * length:,}"
        )


def _steps(run: RunRecord, steps: Sequence[StepRecord]) -> Iterator[str]:
    """Compare the steps with finite losses, and with the moments at which they ended."""
    if lost := sum(not step.finite and step.loss is None for step in steps):
        yield f"the loss is not a number in {lost} of {len(steps)} steps"
    timed = [step for step in steps if step.ended_at_seconds is not None]
    if len(timed) == len(steps) > 1:
        passed = (timed[-1].ended_at_seconds or 0) - (timed[0].ended_at_seconds or 0)
        summed = sum(step.step_seconds for step in timed[1:])
        if abs(passed / summed - 1) > TOLERANCE:
            yield f"its steps take {summed:.4g} s in sum, and {passed:.4g} s passed between their ends"


def _stated_rate(stated: float | None, steps: Sequence[StepRecord]) -> Iterator[str]:
    """Compare a stated throughput with that of the steps: of all, and of those after the first, which starts up."""
    measured = [
        sum(step.tokens or 0 for step in part) / sum(step.step_seconds for step in part)
        for part in (steps, steps[1:], steps[len(steps) // 2 :])
        if part and all(step.tokens for step in part)
    ]
    if stated is not None and measured and min(abs(stated / rate - 1) for rate in measured) > TOLERANCE:
        yield f"the file states {stated:,.0f} tokens/s, and its own steps make {measured[-1]:,.0f}"
