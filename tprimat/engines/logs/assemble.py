"""From what a log said to records: times corrected or derived, tokens counted, and notes on what a reader must know."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tprimat.engines.logs.collect import Collection, LoggedStep
from tprimat.record.schema import Evidence, StepRecord

SEQUENCE_UNIT = 64
"""Sequence lengths in training are multiples of it; a derived one must come close to such a multiple to be believed."""
SEQUENCE_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step trains on, as far as the log or the user tells."""

    gpus: int | None = None
    global_batch_sequences: int | None = None
    sequence_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A log as records."""

    steps: tuple[StepRecord, ...]
    evidence: Evidence
    notes: tuple[str, ...]


def assemble(said: Collection, workload: Workload) -> Assembled:
    """Records from a collection.

    Args:
        said: all lines of the log.
        workload: fills what the log does not say; where both speak they must agree (the caller checks).
    """
    workload = known(said, workload)
    logged = list(said.steps.values())
    losses = {step.step: step.loss for step in logged if step.loss is not None}
    seconds, time_notes = step_times(logged, workload)
    time_notes += correct_second(logged, seconds, losses)
    steps = tuple(record(step, seconds[step.step], losses.get(step.step), workload) for step in logged if step.step in seconds)
    carried, memory_notes = carry_peaks(steps)
    notes = [*time_notes, *memory_notes]
    if said.restarts:
        notes.append(f"the log holds {said.restarts + 1} attempts; steps that were repeated count once, as they went last")
    evidence, more = final_evidence(said)
    return Assembled(steps=carried, evidence=evidence, notes=(*notes, *more))


def known(said: Collection, workload: Workload) -> Workload:
    """What the log says of the workload, else what the caller says."""
    found = said.evidence
    return Workload(
        gpus=world_size(found) or workload.gpus,
        global_batch_sequences=found.get("global_batch_sequences") or workload.global_batch_sequences,
        sequence_tokens=found.get("sequence_tokens") or workload.sequence_tokens,
    )


def world_size(evidence: Mapping[str, Any]) -> int | None:
    """GPUs in all, as printed or as the product of the splits. Logs that print the replicas leave out what is 1."""
    if "world_size" in evidence:
        return int(evidence["world_size"])
    splits = [evidence.get(name) for name in ("data_parallel", "tensor_parallel", "pipeline_parallel")]
    if None in splits:
        return None
    return math.prod(int(split) for split in splits if split) * int(evidence.get("context_parallel", 1))


def final_evidence(said: Collection) -> tuple[Evidence, list[str]]:
    """What the log proves. A fp8 argument proves nothing without Transformer Engine: the local layers of Megatron ignore it."""
    found: dict[str, Any] = dict(said.evidence)
    notes = []
    if found.get("matmul_dtype") == "fp8" and found.get("transformer_engine") is False:
        found["matmul_dtype"] = None
        notes.append("fp8 was asked for, but without Transformer Engine Megatron ignores it")
    split = [found.get(name) for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel")]
    if any(degree not in {None, 1} for degree in split) or split[0] is None:
        found.pop("parameters", None)
    batch, sequence = found.get("global_batch_sequences"), found.get("sequence_tokens")
    found["world_size"] = world_size(found)
    if batch and sequence:
        found["tokens_per_step"] = batch * sequence
    return Evidence(source="log", **found), notes


def record(step: LoggedStep, seconds: float, loss: float | None, workload: Workload) -> StepRecord:
    """One step."""
    batch, sequence = step.batch or workload.global_batch_sequences, workload.sequence_tokens
    values = [value for value in (loss, step.grad_norm) if value is not None]
    return StepRecord(
        step=step.step,
        step_seconds=seconds,
        tokens=batch * sequence if batch and sequence else None,
        loss=finite_or_none(loss),
        grad_norm=finite_or_none(step.grad_norm),
        learning_rate=finite_or_none(step.learning_rate),
        finite=all(math.isfinite(value) for value in values) and not step.failed,
        peak_allocated_bytes=step.allocated,
        peak_reserved_bytes=step.reserved,
    )


def finite_or_none(value: float | None) -> float | None:
    """JSON has no NaN; `finite` tells of it."""
    return value if value is not None and math.isfinite(value) else None


def step_times(logged: Sequence[LoggedStep], workload: Workload) -> tuple[dict[int, float], list[str]]:
    """Step -> seconds, as printed, corrected or derived from rates; steps without any are left out."""
    seconds, notes = {}, []
    for step in logged:
        time = step.seconds if step.seconds is not None else derived_seconds(step, workload)
        if time is not None and math.isfinite(time) and time > 0:
            seconds[step.step] = time
    if logged and any(step.seconds is None for step in logged if step.step in seconds):
        notes.append("step times are derived from printed rates, with the digits that those have")
    gaps = [right.step - left.step for left, right in pairwise(logged)]
    if gaps and (interval := min(gaps)) > 1:
        means = any(step.mean_since_reset or (step.seconds is None and step.tokens_per_second_per_gpu) for step in logged)
        notes.append(f"the log has one line for {interval} steps" + ("; each time is the mean over them" if means else ""))
    if untimed := sum(step.step not in seconds for step in logged):
        notes.append(f"{untimed} logged steps have no time and are left out")
    return seconds, notes


def derived_seconds(step: LoggedStep, workload: Workload) -> float | None:
    """Seconds from a rate over this step alone, when the work of the step is known."""
    batch = step.batch or workload.global_batch_sequences
    if step.sequences_per_second and batch:
        return batch / step.sequences_per_second
    rate, gpus, sequence = step.tokens_per_second_per_gpu, workload.gpus, workload.sequence_tokens
    if rate and gpus and batch and sequence:
        return batch * sequence / (rate * gpus)
    return None


def correct_second(logged: Sequence[LoggedStep], seconds: dict[int, float], losses: dict[int, float]) -> list[str]:
    """Undo the mean in Megatron-LM's second line.

    Since core 0.16 the first line of a process resets neither timer nor losses (training_log, is_first_iteration), so the second
    prints means over both: t2 = n x mean - t1 over n - 1 steps. Older versions reset; which it was shows in the third line,
    and where there is none the second time is dropped.
    """
    if len(logged) < 2 or not (logged[0].mean_since_reset and logged[1].mean_since_reset):
        return []
    first, second = logged[0], logged[1]
    if first.step not in seconds or second.step not in seconds:
        return []
    count = second.step - first.step + 1
    corrected = (count * seconds[second.step] - seconds[first.step]) / (count - 1)
    third = next((step for step in logged[2:] if step.step in seconds), None)
    if not first_line_resets_nothing(logged) or corrected <= 0:
        return []
    if third is None:
        del seconds[second.step]
        return [f"step {second.step} is left out: its time may be a mean with step {first.step}"]
    if ratio(corrected, seconds[third.step]) >= ratio(seconds[second.step], seconds[third.step]):
        return []
    seconds[second.step] = corrected
    if first.loss is not None and second.loss is not None:
        losses[second.step] = (count * second.loss - first.loss) / (count - 1)
    return [f"step {second.step}: the log prints the mean with step {first.step}; the step's own time and loss are derived"]


def first_line_resets_nothing(logged: Sequence[LoggedStep]) -> bool:
    """Whether the first line can be that of a first iteration: with an interval above 1 it then is no multiple of it."""
    if len(logged) < 3:
        return logged[1].step - logged[0].step == 1 or logged[0].step == 1
    interval = logged[2].step - logged[1].step
    return interval == 1 or logged[0].step % interval != 0


def ratio(left: float, right: float) -> float:
    """How far apart two times are, whichever is larger."""
    return abs(math.log(left / right))


def carry_peaks(steps: Sequence[StepRecord]) -> tuple[tuple[StepRecord, ...], list[str]]:
    """Megatron reports the allocator's peak after two steps only. Later steps allocate alike: they carry it, as a note says."""
    reported = [step.step for step in steps if step.peak_allocated_bytes is not None]
    if not reported or reported[-1] == steps[-1].step:
        return tuple(steps), []
    note = f"peak memory was reported last after step {reported[-1]}; later steps carry that value"
    return tuple(_carried(steps)), [note]


def _carried(steps: Sequence[StepRecord]) -> Iterator[StepRecord]:
    allocated: int | None = None
    reserved: int | None = None
    for step in steps:
        allocated = step.peak_allocated_bytes or allocated
        reserved = step.peak_reserved_bytes or reserved
        yield replace(step, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved)


def sequence_from_rates(said: Collection, gpus: int | None) -> int | None:
    """Tokens a sequence, from lines that print the time and the token rate of the same step.

    tokens/s/GPU x seconds x GPUs / sequences. With the five digits that Primus prints this is exact; rates with fewer digits do
    not come close enough to a whole multiple and give None.
    """
    found = set()
    for step in said.steps.values():
        batch = step.batch or said.evidence.get("global_batch_sequences")
        if step.seconds and step.tokens_per_second_per_gpu and batch and gpus and not step.mean_since_reset:
            tokens = step.tokens_per_second_per_gpu * step.seconds * gpus / batch
            nearest = round(tokens / SEQUENCE_UNIT) * SEQUENCE_UNIT if math.isfinite(tokens) else 0
            found.add(nearest if nearest and abs(tokens / nearest - 1) < SEQUENCE_TOLERANCE else None)
    return found.pop() if len(found) == 1 else None
