"""The record of a run from its log: steps and evidence, a caller's claims checked against both, and how the run ended."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tprimat.core import units
from tprimat.core.errors import ConfigError, RecordError
from tprimat.core.limits import LARGEST_WHOLE, finite_or_none
from tprimat.core.models import ModelShape
from tprimat.core.workload import Workload
from tprimat.logs.arithmetic import arithmetic_of, options_of, profiled_steps
from tprimat.logs.checks import (
    check_claims,
    check_claims_of_record,
    check_model,
    machine_of,
    model_of,
    padding,
    shape_of,
    with_evidence,
    world_size,
)
from tprimat.logs.claims import AUTO, Claims, check_claim
from tprimat.logs.contents import LogContents, LoggedStep, larger
from tprimat.logs.failures import classify, diverging
from tprimat.logs.fields import Dialect, number_of
from tprimat.logs.lines import LogLines
from tprimat.logs.parse import LogReading
from tprimat.logs.second_line import correct_seconds
from tprimat.logs.shape import packs, pads
from tprimat.logs.times import batch_of, step_times, tokens_of
from tprimat.records.evidence import with_facts
from tprimat.records.schema import Evidence, Failure, LogSource, RunRecord, StepRecord

SEQUENCE_UNIT = 64
"""Sequence lengths in training are multiples of it; a derived length counts only close to such a multiple."""
SEQUENCE_TOLERANCE = 1e-4
OFTEN = 3
"""Restarts from which a log may not be one run in order."""
UNKNOWN_ENGINE = "unknown"
"""Of a run that failed before its log showed the framework."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as its log shows it."""

    record: RunRecord
    steps: tuple[StepRecord, ...]
    notes: tuple[str, ...]
    """Where the times come from, what was left out, and what a reader must know besides."""
    lines: Mapping[str, int]
    """Fact of the evidence, or argument -> number of the line that states it."""


class FailedBeforeStepOneError(ConfigError):
    """The claims do not suffice for a record, but the log says why its run failed before the first step."""

    failure: Failure


def read_log(
    path: str | Path,
    claims: Claims | None = None,
    *,
    dialect: Dialect | None = None,
    known_models: Mapping[str, ModelShape] | None = None,
) -> Run:
    """Return the run that wrote a training log.

    The log is what a rank or a launcher printed, plain or gzipped, of TPrimat, Primus, Megatron-Bridge, Megatron-LM, NeMo,
    torchtitan, MaxText or DeepSpeed, also behind the prefixes of srun, kubectl and others. A run that failed is a run, too: its
    record has outcome, cause and hint.

    Args:
        path: of the log; "-" is standard input.
        claims: what the caller knows of the run. They fill in what the log omits, and must not contradict it.
        dialect: how the log is written, where it is none of the above.
        known_models: models by the caller's names, which come before those of the table.

    Raises:
        ConfigError: a claim contradicts the log, or neither states something that is needed. FailedBeforeStepOneError: which
            leaves no record of a run whose failure is known.
        RecordError: the log cannot be read, or is not that of a training run.
    """
    log = LogLines(path=str(path))
    reading = LogReading(name=log.name, dialect=dialect)
    claims, known = claims or Claims(), known_models or {}
    try:
        for batch in log.batches():
            reading.add(batch)
    except RecordError:
        _refuse_unknown_model(claims, known)
        raise
    notes = [f"{log.name} is damaged: {log.why_truncated}"] if log.why_truncated else []
    try:
        run = run_of(reading, claims, known, log)
    except (ConfigError, RecordError) as error:
        if log.why_truncated:
            error.why = f"The log is damaged: {log.why_truncated}. {error.why or ''}".strip()
        if isinstance(error, ConfigError) and not reading.contents.steps and (failure := failure_of(reading, ())):
            unrecorded = FailedBeforeStepOneError(error.what, where=error.where, why=error.why, fix=error.fix)
            unrecorded.failure = failure
            raise unrecorded from None
        raise
    return replace(run, notes=(*notes, *run.notes))


def _refuse_unknown_model(claims: Claims, known: Mapping[str, ModelShape]) -> None:
    """Say that there is no such model before what else is wrong: no log has it."""
    if claims.model != AUTO:
        shape_of(claims.model, known)


def run_of(reading: LogReading, claims: Claims, known: Mapping[str, ModelShape], log: LogLines) -> Run:
    """Return the run of the lines of a log.

    Raises:
        ConfigError, RecordError: as read_log.
    """
    if reading.contents.run is None:
        _refuse_unknown_model(claims, known)
    failure = failure_of(reading, ())
    dialect = reading.check(failure.cause if failure is not None else None)
    contents = reading.contents  # of the likeliest dialect, where the run failed before a line showed it
    if contents.run is not None:
        check_claims_of_record(contents.run, claims, reading.name)
        ours = Claims(
            gpus=contents.run.machine.gpus,
            global_batch_sequences=contents.run.ran.global_batch_sequences,
            sequence_tokens=contents.run.ran.sequence_tokens,
        )
        parsed, record = parsed_log(contents, ours), contents.run
        notes = parsed.notes
    else:
        parsed, record = claimed_run(reading, dialect, claims, known, log)
        notes = parsed.evidence.notes
    ending = ending_of(reading, parsed.steps, dialect)
    source = LogSource(
        path=log.name,
        sha256=log.sha256,
        dialect=dialect.name if dialect else None,
        truncated=log.truncated or ending.outcome == "interrupted",
    )
    record = replace(record, outcome=ending.outcome, cause=ending.cause or None, hint=ending.hint, source=source)
    return Run(record=record, steps=parsed.steps, notes=notes, lines=contents.evidence_line)


def claimed_run(
    reading: LogReading, dialect: Dialect | None, claims: Claims, known: Mapping[str, ModelShape], log: LogLines
) -> tuple["ParsedLog", RunRecord]:
    """Return steps and record of another framework's run; how it ended is still open."""
    contents = reading.contents
    check_claims(reading, claims)
    model, shape = model_of(reading, claims, known)
    machine = machine_of(reading, claims, dialect)
    parsed = parse_with_claims(reading, replace(claims, gpus=machine.gpus))
    cautions = check_model(reading, shape, parsed.evidence, claims)
    documents = documents_of(contents, with_evidence(claims, parsed.evidence))
    evidence = with_facts(parsed.evidence, documents=documents, notes=(*parsed.evidence.notes, *cautions))
    engine = dialect.name if dialect else UNKNOWN_ENGINE
    record = RunRecord(
        run_id=f"{model}-{engine}-{(log.sha256 or '')[:12]}",
        model=model,
        strategy=None,
        engine=engine,
        workload=Workload(
            shape=shape, global_batch_sequences=claims.global_batch_sequences, sequence_tokens=claims.sequence_tokens
        ),
        machine=machine,
        started_at=None,
        clock="framework",
        outcome="running",
        evidence=evidence,
        engine_options=options_of(contents.arguments),
        profiled_steps=profiled_steps(contents.arguments, parsed.steps),
    )
    return replace(parsed, evidence=evidence), record


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedLog:
    """A log as records."""

    steps: tuple[StepRecord, ...]
    evidence: Evidence
    notes: tuple[str, ...]


def parsed_log(contents: LogContents, claims: Claims) -> ParsedLog:
    """Turn the contents of a log into records.

    The claims fill in what the log does not state; where both do, they must agree (the caller checks).
    """
    evidence, evidence_notes = evidence_of(contents)
    claims = with_evidence(claims, evidence)
    times, notes = step_times(contents, claims)
    losses: dict[int, float] = {}
    for correction in correct_seconds(contents, claims):
        if times[correction.step] is not None:
            times[correction.step] = correction.seconds
            losses |= {} if correction.loss is None else {correction.step: correction.loss}
            notes.append(correction.note)
    logged = [step for step in contents.steps.values() if times[step.step] is not None]
    steps = [step_record(step, times[step.step] or 0.0, claims, losses.get(step.step)) for step in logged]
    steps, peak_notes = carry_peaks(steps, contents)
    notes += [*peak_notes, *contents.changes]
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
    if number_of(contents.arguments, "num_experts") is None:  # both are printed for dense models, too
        evidence.pop("expert_capacity", None)
        if evidence.get("routing") != "balanced":
            evidence.pop("routing", None)
    degrees = [evidence.get(name) for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel")]
    of_rank = evidence.pop("rank_parameters", None)
    if degrees[0] == 1 and all(degree in {None, 1} for degree in degrees):
        evidence.setdefault("parameters", of_rank)
    evidence["world_size"] = world_size(evidence)
    return with_products(with_facts(Evidence(source="log"), **evidence)), notes


def with_products(evidence: Evidence, gpus: int | None = None) -> Evidence:
    """Add what follows from other evidence: the tokens of a step, and on so many GPUs the data-parallel degree."""
    seen = evidence.workload
    tensor, pipeline, context, data = seen.tensor_parallel, seen.pipeline_parallel, seen.context_parallel, seen.data_parallel
    if data is None and gpus and tensor and pipeline and context:
        ranks = tensor * pipeline * context
        data = gpus // ranks if gpus % ranks == 0 else None
    return with_facts(evidence, data_parallel=data, tokens_per_step=seen.tokens_per_step)


def parse_with_claims(reading: LogReading, claims: Claims) -> ParsedLog:
    """Return steps and evidence, with the sequence length from printed rates where the log does not state it."""
    contents = reading.contents
    derived = None if "sequence_tokens" in contents.evidence else sequence_from_rates(contents, claims.gpus)
    check_claim("--sequence-length", claims.sequence_tokens, derived, f"{reading.name}:{contents.first_line}")
    parsed = parsed_log(contents, replace(claims, sequence_tokens=claims.sequence_tokens or derived))
    notes = [*parsed.evidence.notes, *parsed.notes]
    if derived is not None:
        notes.append(f"a sequence length of {derived} tokens follows from the printed rates and times")
    if contents.device_used_bytes is not None:
        notes.append(f"at most {units.gibibytes(contents.device_used_bytes)} in use on one device, including other processes")
    sequence = parsed.evidence.workload.sequence_tokens or derived
    evidence = with_products(with_facts(parsed.evidence, sequence_tokens=sequence), claims.gpus)
    return replace(parsed, evidence=replace(evidence, notes=tuple(notes)))


def sequence_from_rates(contents: LogContents, gpus: int | None) -> int | None:
    """Return the tokens of a sequence, from lines that print the time and the token rate of the same step.

    tokens/s/GPU x seconds x GPUs / sequences. With the five digits that Primus prints this is exact. Rates with fewer digits do
    not come close enough to a multiple of SEQUENCE_UNIT, and give None.
    """
    if not gpus:
        return None
    claims = Claims(global_batch_sequences=contents.evidence.get("global_batch_sequences"))
    lengths: set[int] = set()
    for step in contents.steps.values():
        rate, seconds = finite_or_none(step.tokens_per_second_per_gpu), finite_or_none(step.step_seconds)
        batch = batch_of(step, claims)
        if step.mean_since_reset or batch is None or not rate or not seconds or min(rate, seconds) <= 0:
            continue
        tokens = rate * seconds * gpus / batch
        nearest = round(tokens / SEQUENCE_UNIT) * SEQUENCE_UNIT if math.isfinite(tokens) else 0
        if nearest <= 0 or abs(tokens - nearest) >= SEQUENCE_TOLERANCE * nearest:
            return None
        lengths.add(nearest)
    return lengths.pop() if len(lengths) == 1 else None


def step_record(step: LoggedStep, seconds: float, claims: Claims, loss: float | None = None) -> StepRecord:
    """Return the record of one logged step, whose own loss may differ from the printed one."""
    return StepRecord(
        step=step.step,
        step_seconds=seconds,
        tokens=tokens_of(step, claims),
        loss=finite_or_none(step.loss if loss is None else loss),
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


def documents_of(contents: LogContents, claims: Claims) -> str | None:
    """Return whether sequences are packed with documents, padded, or both; None where the log shows neither."""
    padded = pads(contents.arguments) or bool(padding(contents, claims))
    return " and ".join(["packed"] * packs(contents.arguments) + ["padded"] * padded) or None


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
    if any(step.is_printed for step in contents.steps.values()):
        return Failure(outcome="failed", cause=f"The log times {len(contents.steps)} steps, and none counts: see the notes.")
    return Failure(
        outcome="failed",
        cause=f"The log names {len(contents.steps)} steps, and none has a time.",
        hint="state the batch with --global-batch-size, --sequence-length and --num-gpus: a printed rate then gives a time",
    )


def ending_of(reading: LogReading, steps: Sequence[StepRecord], dialect: Dialect | None) -> Failure:
    """Return how the run ended, as far as the log shows. A log without a measured step is that of a run that failed."""
    contents = reading.contents
    if not steps:
        return failure_of(reading, ()) or nothing_measured(contents)
    total, last = contents.total_steps, contents.newest
    completed = diverging(steps) or Failure(outcome="completed", cause="")
    if contents.finished or (total is not None and last >= total):
        return completed
    if failure := failure_of(reading, steps):
        return failure
    if total is None and not (dialect and dialect.marks_its_end):
        return completed
    planned = "" if total is None else f" of {total}"
    return Failure(outcome="interrupted", cause=f"The log ends after step {last}{planned} without saying why.")
