"""The record of a run from its log: steps and evidence, the user's flags checked against both, and how the run ended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tprimat.config.schema import Config
from tprimat.core import units
from tprimat.core.accelerators import find_accelerator
from tprimat.logs.arithmetic import arithmetic_of, options_of, profiled_steps
from tprimat.logs.claims import (
    AUTO,
    MODEL_FLAG,
    Claim,
    Flags,
    check_claim,
    check_flags,
    check_model,
    check_strategy,
    machine_of,
    merged_workload,
    model_of,
    padding,
    unknown_model,
    world_size,
)
from tprimat.logs.failures import Failure, classify, diverging
from tprimat.logs.parse import Dialect, LogReading
from tprimat.logs.second_line import correct_seconds
from tprimat.logs.shape import number_of, packs, pads
from tprimat.logs.steps import (
    LogContents,
    LoggedStep,
    Workload,
    batch_of,
    is_printed,
    larger,
    step_times,
)
from tprimat.records.evidence import CAUTION
from tprimat.records.limits import LARGEST_WHOLE
from tprimat.records.schema import Evidence, LogSource, Machine, RunRecord, StepRecord, finite_or_none

SEQUENCE_UNIT = 64
"""Sequence lengths in training are multiples of it; a derived length counts only close to such a multiple."""
SEQUENCE_TOLERANCE = 1e-4
OFTEN = 3
"""Restarts from which a log may not be one run in order."""
UNKNOWN_ENGINE = "unknown"
"""Of a run that failed before its log showed the framework."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedLog:
    """A log as records."""

    steps: tuple[StepRecord, ...]
    evidence: Evidence
    notes: tuple[str, ...]


def parsed_log(contents: LogContents, workload: Workload) -> ParsedLog:
    """Turn the contents of a log into records.

    The workload fills in what the log does not state; where both do, they must agree (the caller checks).
    """
    evidence, evidence_notes = evidence_of(contents)
    workload = merged_workload(evidence, workload)
    times, notes = step_times(contents, workload)
    steps = [
        step_record(step, seconds, workload) for step in contents.steps.values() if (seconds := times[step.step]) is not None
    ]
    for correction in correct_seconds(contents, workload):
        if times[correction.step] is None:
            continue
        index = next(index for index, step in enumerate(steps) if step.step == correction.step)
        if correction.seconds is None:
            del steps[index]
        else:
            loss = steps[index].loss if correction.loss is None else finite_or_none(correction.loss)
            steps[index] = replace(steps[index], step_seconds=correction.seconds, loss=loss)
        notes.append(correction.note)
    steps, peak_notes = carry_peaks(steps, contents)
    notes += peak_notes
    notes += contents.changes
    if contents.restarts >= OFTEN and 2 * contents.restarts >= len(contents.steps):
        notes.append("the step number goes back as often as it rises: lines are out of order, or of several processes")
    if contents.restarts:
        notes.append(f"the log holds {contents.restarts + 1} attempts; of repeated steps the last attempt counts")
    return ParsedLog(steps=tuple(steps), evidence=evidence, notes=(*notes, *evidence_notes))


def evidence_of(contents: LogContents) -> tuple[Evidence, list[str]]:
    """Return what the log proves, with notes. An fp8 argument proves nothing without Transformer Engine: Megatron ignores it."""
    evidence: dict[str, Any] = dict(contents.evidence)
    notes = []
    if evidence.pop("fp8", False) and evidence.get("matmul_dtype") != "fp4":  # torchtitan swaps MX layers of both
        evidence["matmul_dtype"] = "fp8"
    if evidence.get("matmul_dtype") == "fp8" and evidence.get("transformer_engine") is False:
        evidence["matmul_dtype"] = None
        notes.append("fp8 was requested, but Megatron ignores it without Transformer Engine")
    evidence |= arithmetic_of(contents.arguments, evidence)
    if number_of(contents.arguments, "num_experts") is None and evidence.get("routing") != "balanced":
        evidence.pop("routing", None)  # printed for dense models, too
    if number_of(contents.arguments, "num_experts") is None:
        evidence.pop("expert_capacity", None)
    degrees = [evidence.get(name) for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel")]
    of_rank = evidence.pop("rank_parameters", None)
    if degrees[0] == 1 and all(degree in {None, 1} for degree in degrees):
        evidence.setdefault("parameters", of_rank)
    batch, sequence = evidence.get("global_batch_sequences"), evidence.get("sequence_tokens")
    evidence["world_size"] = world_size(evidence)
    if batch and sequence:
        evidence["tokens_per_step"] = batch * sequence
    return Evidence(source="log", **evidence), notes


def step_record(step: LoggedStep, seconds: float, workload: Workload) -> StepRecord:
    """Return the record of one logged step."""
    batch, sequence = batch_of(step, workload), workload.sequence_tokens
    return StepRecord(
        step=step.step,
        step_seconds=seconds,
        tokens=batch * sequence if batch and sequence else None,
        loss=finite_or_none(step.loss),
        grad_norm=finite_or_none(step.grad_norm),
        learning_rate=finite_or_none(step.learning_rate),
        finite=step.finite,
        peak_allocated_bytes=count_or_none(step.peak_allocated_bytes),
        peak_reserved_bytes=count_or_none(step.peak_reserved_bytes),
    )


def count_or_none(value: int | None) -> int | None:
    """Return a number of bytes that can be one."""
    return value if value is not None and 0 <= value <= LARGEST_WHOLE else None


def carry_peaks(steps: Sequence[StepRecord], contents: LogContents) -> tuple[list[StepRecord], list[str]]:
    """Give later steps the last reported peak, with a note.

    Megatron reports it after its first lines only, which may be left out; later steps allocate the same.
    """
    reported = [
        step.step
        for step in contents.steps.values()
        if count_or_none(larger(step.peak_allocated_bytes, step.peak_reserved_bytes)) is not None
    ]
    if not (steps and reported) or reported[-1] >= steps[-1].step:
        return list(steps), []
    own = {step.step: step for step in steps}
    carried, allocated, reserved = [], None, None
    for logged in contents.steps.values():
        allocated = count_or_none(logged.peak_allocated_bytes) or allocated
        reserved = count_or_none(logged.peak_reserved_bytes) or reserved
        if logged.step in own:
            carried.append(replace(own[logged.step], peak_allocated_bytes=allocated, peak_reserved_bytes=reserved))
    return carried, [f"peak memory was reported last after step {reported[-1]}; later steps carry that value"]


def sequence_from_rates(contents: LogContents, gpus: int | None) -> int | None:
    """Return the tokens of a sequence, from lines that print the time and the token rate of the same step.

    tokens/s/GPU x seconds x GPUs / sequences. With the five digits that Primus prints this is exact. Rates with fewer digits do
    not come close enough to a multiple of SEQUENCE_UNIT, and give None.
    """
    if not gpus:
        return None
    workload = Workload(global_batch_sequences=contents.evidence.get("global_batch_sequences"))
    lengths: set[int] = set()
    for step in contents.steps.values():
        rate, seconds = finite_or_none(step.tokens_per_second_per_gpu), finite_or_none(step.step_seconds)
        batch = batch_of(step, workload)
        if step.mean_since_reset or batch is None or not rate or not seconds or min(rate, seconds) <= 0:
            continue
        tokens = rate * seconds * gpus / batch
        nearest = round(tokens / SEQUENCE_UNIT) * SEQUENCE_UNIT if math.isfinite(tokens) else 0
        if nearest <= 0 or abs(tokens - nearest) >= SEQUENCE_TOLERANCE * nearest:
            return None
        lengths.add(nearest)
    return lengths.pop() if len(lengths) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedRun:
    """A run as its log shows it."""

    run: RunRecord
    steps: tuple[StepRecord, ...]
    notes: tuple[str, ...]


def extract(reading: LogReading, flags: Flags, source: LogSource, config: Config, *, growing: bool = False) -> ExtractedRun:
    """Return the record of the run that wrote a log, to which more lines may come (`growing`).

    Raises:
        ConfigError: a flag contradicts the log, or neither states something that is needed.
        RecordError: the log is not that of a training run.
    """
    if reading.contents.run is None and (unknown := unknown_model(flags, config)) is not None:
        raise unknown  # before what the log lacks: no log has a model that does not exist
    dialect = reading.check(failure.cause if not growing and (failure := failure_of(reading, ())) else None)
    if reading.contents.run is not None:
        return own_run(reading, reading.contents.run, flags, source, growing=growing)
    check_flags(reading, flags)
    model, shape = model_of(reading, flags, config)
    claimed, flags = flags, replace(flags, model=model)
    machine = machine_of(reading, flags, dialect)
    parsed = parse_with_flags(reading, flags, machine)
    check_strategy(reading, parsed.evidence, flags, machine, config)
    believed = check_model(reading, shape, parsed.evidence, claimed)
    if dialect is not None and dialect.unmasked_rate and parsed.steps:
        believed += (f"{CAUTION}{dialect.name} counts unmasked tokens only: step times hold where every sequence is full",)
    filled = documents_of(reading.contents, merged_workload(parsed.evidence, flags.workload))
    parsed = replace(parsed, evidence=replace(parsed.evidence, documents=filled, notes=(*parsed.evidence.notes, *believed)))
    ending = ending_of(reading, parsed.steps, dialect, growing=growing)
    engine = dialect.name if dialect else UNKNOWN_ENGINE
    truncated = source.truncated or ending.outcome == "interrupted"
    run = RunRecord(
        run_id=f"{flags.model}-{engine}-{(source.sha256 or 'growing')[:12]}",
        model=flags.model,
        shape=shape,
        strategy=flags.strategy,
        engine=engine,
        matmul_dtype=parsed.evidence.matmul_dtype,
        recompute=parsed.evidence.recompute,
        recompute_layers=parsed.evidence.recompute_layers,
        routing=parsed.evidence.routing,
        expert_capacity=parsed.evidence.expert_capacity,
        machine=machine,
        started_at=None,
        clock="framework",
        outcome=ending.outcome,
        cause=ending.cause or None,
        hint=ending.hint,
        evidence=parsed.evidence,
        engine_options=options_of(reading.contents.arguments),
        profiled_steps=profiled_steps(reading.contents.arguments, parsed.steps),
        source=replace(source, dialect=dialect.name if dialect else None, truncated=truncated),
        **layout_fields(parsed.evidence, flags),
    )
    return ExtractedRun(run=run, steps=parsed.steps, notes=parsed.evidence.notes)


def own_run(reading: LogReading, run: RunRecord, flags: Flags, source: LogSource, *, growing: bool) -> ExtractedRun:
    """Return the record that TPrimat itself printed, with the steps of the log and how it ended.

    Raises:
        ConfigError: a flag contradicts the record.
    """
    for flag, requested, recorded in (
        (MODEL_FLAG, None if flags.model == AUTO else flags.model, run.model),
        ("--num-gpus", flags.gpus, run.machine.gpus),
        ("--num-nodes", flags.nodes, run.machine.nodes),
        ("--global-batch-size", flags.global_batch_sequences, run.global_batch_sequences),
        ("--sequence-length", flags.sequence_tokens, run.sequence_tokens),
        ("--parallel", flags.strategy, run.strategy),
    ):
        check_claim(Claim(flag, requested, recorded, None), reading.name)
    named, recorded = flags.accelerator, run.machine.accelerator
    if named and (find_accelerator(named) is None or find_accelerator(named) is not find_accelerator(recorded or "")):
        check_claim(Claim("--gpu", named, recorded, None), reading.name)
    workload = Workload(
        gpus=run.machine.gpus, global_batch_sequences=run.global_batch_sequences, sequence_tokens=run.sequence_tokens
    )
    parsed = parsed_log(reading.contents, workload)
    dialect = reading.check(None)
    ending = ending_of(reading, parsed.steps, dialect, growing=growing)
    ended = replace(
        run,
        outcome=ending.outcome,
        cause=ending.cause or None,
        hint=ending.hint,
        source=replace(
            source, dialect=dialect.name if dialect else None, truncated=source.truncated or ending.outcome == "interrupted"
        ),
    )
    return ExtractedRun(run=ended, steps=parsed.steps, notes=parsed.notes)


def documents_of(contents: LogContents, workload: Workload) -> str | None:
    """Return whether sequences are packed with documents, padded, or both; None where the log shows neither."""
    padded = pads(contents.arguments) or bool(padding(contents, workload))
    found = ["packed"] * packs(contents.arguments) + ["padded"] * padded
    return " and ".join(found) or None


def parse_with_flags(reading: LogReading, flags: Flags, machine: Machine) -> ParsedLog:
    """Return steps and evidence, with the sequence length from printed rates where the log does not state it."""
    contents = reading.contents
    derived = None if "sequence_tokens" in contents.evidence else sequence_from_rates(contents, machine.gpus)
    check_claim(Claim("--sequence-length", flags.sequence_tokens, derived, contents.first_line), reading.name)
    workload = replace(flags.workload, gpus=machine.gpus, sequence_tokens=flags.sequence_tokens or derived)
    parsed = parsed_log(contents, workload)
    notes = [*parsed.notes]
    if derived is not None:
        notes.append(f"a sequence length of {derived} tokens follows from the printed rates and times")
    if contents.device_used_bytes is not None:
        notes.append(f"at most {units.gibibytes(contents.device_used_bytes)} in use on one device, including other processes")
    evidence = completed_evidence(parsed.evidence, machine.gpus, derived)
    return replace(parsed, evidence=replace(evidence, notes=(*evidence.notes, *notes)))


def completed_evidence(evidence: Evidence, gpus: int | None, sequence: int | None) -> Evidence:
    """Add what follows from the evidence: the data-parallel degree, and the sequence length that the rates show."""
    tensor, pipeline, context = evidence.tensor_parallel, evidence.pipeline_parallel, evidence.context_parallel
    data = evidence.data_parallel
    if data is None and gpus and tensor and pipeline and context:
        ranks = tensor * pipeline * context
        data = gpus // ranks if gpus % ranks == 0 else None
    tokens = evidence.sequence_tokens or sequence
    batch = evidence.global_batch_sequences
    return replace(
        evidence, data_parallel=data, sequence_tokens=tokens, tokens_per_step=batch * tokens if batch and tokens else None
    )


def layout_fields(evidence: Evidence, flags: Flags) -> dict[str, Any]:
    """Return the fields that the record shares with its evidence; batch and sequence may come from flags."""
    return {
        "tensor_parallel": evidence.tensor_parallel,
        "pipeline_parallel": evidence.pipeline_parallel,
        "virtual_pipeline": evidence.virtual_pipeline,
        "context_parallel": evidence.context_parallel,
        "expert_parallel": evidence.expert_parallel,
        "data_parallel": evidence.data_parallel,
        "micro_batch_sequences": evidence.micro_batch_sequences,
        "global_batch_sequences": evidence.global_batch_sequences or flags.global_batch_sequences,
        "sequence_tokens": evidence.sequence_tokens or flags.sequence_tokens,
    }


def failure_of(reading: LogReading, steps: Sequence[StepRecord]) -> Failure | None:
    """Return why the run failed; None where the log does not say."""
    lines = reading.failure_lines()
    failure = classify(1, lines, steps) if lines else None
    if failure is None or (failure.kind is None and not any("Traceback (most recent call last)" in line for line in lines)):
        return None
    return failure


def nothing_measured(contents: LogContents) -> Failure:
    """Return why a log holds no measured step, where it names no failure."""
    if not contents.steps:
        return Failure(outcome="failed", cause="The log ends before the first step without saying why.")
    if any(is_printed(step) for step in contents.steps.values()):
        return Failure(outcome="failed", cause=f"The log times {len(contents.steps)} steps, and none counts: see the notes.")
    return Failure(
        outcome="failed",
        cause=f"The log names {len(contents.steps)} steps, and none has a time.",
        hint="state the batch with --global-batch-size, --sequence-length and --num-gpus: a printed rate then gives a time",
    )


def failure_before_first_step(reading: LogReading) -> Failure | None:
    """Return why the run of a log without steps failed; None where there are steps, or no cause."""
    return None if reading.contents.steps else failure_of(reading, ())


def ending_of(reading: LogReading, steps: Sequence[StepRecord], dialect: Dialect | None, *, growing: bool) -> Failure:
    """Return how the run ended, as far as the log shows. A log without a measured step is that of a run that failed."""
    contents = reading.contents
    if not (steps or growing):
        return failure_of(reading, ()) or nothing_measured(contents)
    total, last = contents.total_steps, contents.newest
    if contents.finished or (total is not None and last >= total):
        return diverging(steps) or Failure(outcome="completed", cause="")
    if growing:
        return Failure(outcome="running", cause="")
    if failure := failure_of(reading, steps):
        return failure
    if total is None and not (dialect and dialect.marks_its_end):
        return diverging(steps) or Failure(outcome="completed", cause="")
    planned = "" if total is None else f" of {total}"
    return Failure(outcome="interrupted", cause=f"The log ends after step {last}{planned} without saying why.")
