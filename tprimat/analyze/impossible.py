"""Runs whose record contradicts itself or physics, from any program: shown with the reason, and not counted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile, pairwise

from tprimat.analyze.window import steady_steps
from tprimat.core.accelerators import MEMORY_SPREAD, find_accelerator, peak_flops
from tprimat.core.flops import parameters
from tprimat.core.models import padded_vocabulary
from tprimat.core.rows import DATA, document
from tprimat.records.benchmark_file import RunResult
from tprimat.records.schema import Finding, RunMetrics, RunRecord, StepRecord

LIMITS: Mapping[str, float] = document(DATA / "tolerances.yaml")["records"]


def contradictions(result: RunResult, metrics: RunMetrics | None) -> tuple[Finding, ...]:
    """List why a run cannot be what it says; empty if nothing contradicts it."""
    run, steps = result.run, result.steps
    steady = steady_steps(steps, metrics.window) if metrics else steps
    return (
        *_against_evidence(run),
        *_against_arithmetic(run),
        *_memory(run, steps),
        *_steps(run, steps),
        *_tokens(run, steady),
        *(_rates(run, metrics, steady) if metrics else ()),
        *_stated_rate(result.stated_tokens_per_second, steps),
    )


def _against_evidence(run: RunRecord) -> Iterator[Finding]:
    """Compare a record with its own evidence: a file may have been changed since it was written."""
    evidence = run.evidence
    if evidence is None:
        return
    asked, seen = run.workload, evidence.workload
    compared = document(DATA / "traits.yaml")["as_asked"]
    pairs = [
        *((words, getattr(asked, name), getattr(seen, name)) for name, words in compared.items()),
        ("GPU count", run.machine.gpus, evidence.world_size),
        ("tokens a step", asked.tokens_per_step, evidence.tokens_per_step),
    ]
    for words, recorded, ran in pairs:
        if recorded is not None and ran is not None and recorded != ran:
            yield Finding(kind="unlike evidence", subjects=(words, str(recorded), str(ran)))
    if run.ran.shape is not None and evidence.parameters is not None and evidence.source == "running_framework":
        expected = parameters(replace(run.ran.shape, vocabulary=padded_vocabulary(run.ran.shape))).total
        if abs(evidence.parameters / expected - 1) > LIMITS["parameters"]:
            yield Finding(kind="other parameters", numbers=(evidence.parameters, expected))


def _against_arithmetic(run: RunRecord) -> Iterator[Finding]:
    degrees = (run.ran.tensor_parallel, run.ran.pipeline_parallel, run.ran.data_parallel, run.machine.gpus)
    if None not in degrees:
        tensor, pipeline, data, gpus = (degree or 1 for degree in degrees)
        ranks = tensor * pipeline * data * (run.ran.context_parallel or 1)
        if ranks != gpus:
            yield Finding(kind="other ranks", numbers=(ranks, gpus))
    whole, micro, data_ranks = run.ran.global_batch_sequences, run.ran.micro_batch_sequences, run.ran.data_parallel
    if whole and micro and data_ranks and whole % (micro * data_ranks):
        yield Finding(kind="uneven batch", numbers=(whole, micro, data_ranks))


def _memory(run: RunRecord, steps: Sequence[StepRecord]) -> Iterator[Finding]:
    """Compare the accelerator with its memory and with the nodes, and the peak with a GPU; a CPU's process has no such bound."""
    known, memory = find_accelerator(run.machine.accelerator), run.machine.memory_bytes
    if known and memory and not known.may_have(memory):
        yield Finding(kind="other memory", subjects=(known.name,), numbers=(known.usable_bytes, memory))
    others = sorted({other.name for node in run.nodes or () if (other := find_accelerator(node.accelerator))})
    if known and others and known.name not in others:
        yield Finding(kind="other GPU", subjects=(known.name, ", ".join(others)))
    peak = max((step.peak_allocated_bytes or 0 for step in steps), default=0)
    most = memory or (max(known.reported_sizes) if known else 0)
    if run.machine.platform != "cpu" and most and peak > (1 + MEMORY_SPREAD) * most:
        yield Finding(kind="too much memory", numbers=(peak, most))


def _rates(run: RunRecord, metrics: RunMetrics, steady: Sequence[StepRecord]) -> Iterator[Finding]:
    """Compare FLOP/s with the accelerator's peak, in its fastest dtype where the dtype is not known; and power with its limit."""
    known, flops = find_accelerator(run.machine.accelerator), metrics.model_flops_per_second_per_gpu
    dense = peak_flops(run.machine.accelerator, run.ran.matmul_dtype)  # whatever peak the user counts by
    share = flops.value / dense if metrics.mfu is not None and flops and dense else 0.0
    if share > 1:
        yield Finding(kind="too much MFU", numbers=(share,))
    elif run.clock == "step_end":  # a framework may print a step late, and the next one short
        least = share * metrics.mean_step_seconds
        if fast := [step.step for step in steady if step.step_seconds < least]:
            yield Finding(kind="too fast", numbers=(fast[0], len(fast), len(steady)))
    if metrics.mfu is None and known and flops and flops.value > (most := max(known.dense_flops.values())):
        yield Finding(kind="too many FLOP", subjects=(known.name,), numbers=(flops.value, most))
    rate, joules, limit = metrics.tokens_per_second_per_gpu, metrics.joules_per_token, run.machine.power_limit_watts
    if rate and joules and limit and rate.value * joules > (1 + LIMITS["figures"]) * limit:
        yield Finding(kind="too much power", numbers=(rate.value * joules, limit))


def _tokens(run: RunRecord, steps: Sequence[StepRecord]) -> Iterator[Finding]:
    """Compare the tokens of each step that counts with the batch."""
    batch, length = run.ran.global_batch_sequences or 0, run.ran.sequence_tokens or 0
    other = [step.tokens for step in steps if step.tokens is not None and abs(step.tokens - batch * length) > 1e-6 * step.tokens]
    if batch and length and other:
        yield Finding(kind="other tokens", numbers=(len(other), len(steps), other[0], batch, length, batch * length))


def _steps(run: RunRecord, steps: Sequence[StepRecord]) -> Iterator[Finding]:
    """Compare the steps with their number, with finite losses once fp16 has found its first scale, and with when they ended."""
    whole = steps[-1].step + 1 - (1 if run.command else steps[0].step) if steps and run.clock == "step_end" else 0
    if len(steps) < (known := max(whole, run.steps_recorded or 0)) and all(step.merged == 1 for step in steps):
        yield Finding(kind="lost steps", numbers=(known, len(steps)))
    settled = list(dropwhile(lambda step: not step.finite and step.loss is None, steps)) or steps
    if lost := sum(not step.finite and step.loss is None for step in settled):
        yield Finding(kind="no loss", numbers=(lost, len(steps)))
    places = [place for place, step in enumerate(steps) if step.loss is not None]
    rarest = max((later - place for place, later in pairwise([-1, *places])), default=0)
    silent = len(steps) - 1 - places[-1] if places else 0
    half = len(steps) // 2
    early, late = (sum(low <= place < low + half for place in places) for low in (0, len(steps) - half))
    if silent >= rarest > 0 or late < early - 1:  # a log may print the loss of every tenth step
        yield Finding(kind="lost losses", numbers=(len(places), len(steps)))
    passed = {
        step: step.ended_at_seconds - before.ended_at_seconds
        for before, step in pairwise(steps)
        if before.ended_at_seconds is not None and step.ended_at_seconds is not None and step.step == before.step + 1
    }
    summed, span = sum(step.step_seconds for step in passed), sum(passed.values())
    own_clock = run.clock == "step_end"  # a framework's own timer leaves out what lies between its steps
    if summed > 0 and abs(span / summed - 1) > (LIMITS["moments"] if own_clock else LIMITS["figures"]):
        yield Finding(kind="other span", numbers=(summed, span))
        return
    slack = {step: LIMITS["moments"] * step.step_seconds + LIMITS["printed_seconds"] for step in passed}
    off = [step for step, seconds in passed.items() if abs(seconds - step.step_seconds) > slack[step]]
    if own_clock and off:
        yield Finding(kind="other moments", numbers=(off[0].step, len(off), len(steps)))


def _stated_rate(stated: float | None, steps: Sequence[StepRecord]) -> Iterator[Finding]:
    """Compare a stated throughput with that of the steps: of all, and of those after the first, which starts up."""
    measured = [
        sum(step.tokens or 0 for step in part) / sum(step.step_seconds for step in part)
        for part in (steps, steps[1:], steps[len(steps) // 2 :])
        if part and all(step.tokens for step in part)
    ]
    if stated is not None and measured and min(abs(stated / rate - 1) for rate in measured) > LIMITS["figures"]:
        yield Finding(kind="other rate", numbers=(stated, measured[-1]))
