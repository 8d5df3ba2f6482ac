"""The record of a run from its log: steps and evidence, a caller's claims checked against both, and how the run ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from tprimat.core import units
from tprimat.core.accelerators import taken_as
from tprimat.core.errors import ConfigError, RecordError
from tprimat.core.limits import LARGEST_WHOLE, finite_or_none
from tprimat.core.models import ModelShape
from tprimat.core.workload import Workload
from tprimat.logs import times as timing
from tprimat.logs.arguments import arithmetic_of, options_of
from tprimat.logs.checks import check_claims, check_model, logged_claims, machine_of, model_of, with_evidence, world_size
from tprimat.logs.contents import Claims, LogContents, LoggedStep, check_claim
from tprimat.logs.failures import diverging
from tprimat.logs.fields import MOST, Dialect, number_of
from tprimat.logs.formats.megatron import RANK_PARAMETERS
from tprimat.logs.lines import LogLines
from tprimat.logs.parse import LogReading
from tprimat.logs.shape import packs, pads
from tprimat.records.evidence import with_facts
from tprimat.records.schema import Evidence, Failure, LogSource, RunRecord, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as its log shows it."""

    record: RunRecord
    steps: tuple[StepRecord, ...]
    notes: tuple[str, ...]
    """Where the times come from, what was left out, and what a reader must know besides."""


class UnrecordedError(ConfigError, RecordError):
    """There is no record, since claims are missing or steps are not read, but the log says how its run ended."""

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
    torchtitan, MaxText or DeepSpeed, also behind the prefixes of srun, kubectl and others. Of several attempts in it the last one
    counts. A run that failed is a run, too: its record has outcome, cause and hint. Ctrl-C ends the reading and keeps what was
    read.

    Args:
        path: of the log; "-" is standard input.
        claims: what the caller knows of the run. They fill in what the log omits, and must not contradict it.
        dialect: how the log is written, where it is none of the above.
        known_models: models by the caller's names, which come before those of the table.

    Raises ConfigError: a claim contradicts the log, or neither states something that is needed. UnrecordedError: which leaves no
    record of a run whose end is known; RecordError: the log cannot be read, or is not that of a training run.
    """
    log = LogLines(path=str(path))
    reading = LogReading(name=log.name, dialect=dialect)
    claims, known = claims or Claims(), known_models or {}
    notes = []
    try:
        for batch in log.batches():
            reading.add(batch)
    except KeyboardInterrupt:
        notes.append("stopped; what was read so far is kept")
    notes += [f"{log.name} is damaged: {log.why_truncated}"] if log.why_truncated else []
    try:
        run = run_of(reading, claims, known, log)
    except (ConfigError, RecordError) as error:
        if log.why_truncated:
            error.why = f"The log is damaged: {log.why_truncated}. {error.why or ''}".strip()
        failure = reading.failure(()) if isinstance(error, ConfigError) else reading.foreign_ending()
        if failure and not (reading.contents.steps and (claims.accelerator or is_complete(reading.attempts.latest))):
            unrecorded = UnrecordedError(error.what, where=error.where, why=error.why, fix=error.fix)
            unrecorded.failure = failure
            raise unrecorded from None
        raise
    return replace(run, notes=(*notes, *run.notes))


def run_of(reading: LogReading, claims: Claims, known: Mapping[str, ModelShape], log: LogLines) -> Run:
    """Return the run of the lines that were read, or raise as read_log does."""
    dialect = reading.check(reading.failure(()))
    contents = reading.contents  # of the likeliest dialect, where the run failed before a line showed it
    claims, caution = check_claims(reading, claims)
    if (record := contents.run) is not None:
        steps, _, notes = parsed_log(contents, logged_claims(contents))
    else:
        steps, record = claimed_run(reading, dialect, claims, known, log)
        notes = record.evidence.notes if record.evidence else ()
    ending = _ending_of(reading, steps, dialect)
    source = LogSource(
        path=log.name,
        sha256=log.sha256,
        dialect=dialect.name if dialect else None,
        truncated=log.why_truncated is not None or ending.outcome == "interrupted",
    )
    record = replace(record, outcome=ending.outcome, cause=ending.cause or None, hint=ending.hint, source=source)
    notes = (*filter(None, [caution]), *notes, *_attempt_notes(reading))
    return Run(record=record, steps=steps, notes=notes)


def claimed_run(
    reading: LogReading, dialect: Dialect | None, claims: Claims, known: Mapping[str, ModelShape], log: LogLines
) -> tuple[tuple[StepRecord, ...], RunRecord]:
    """Return steps and record of another framework's run; how it ended is still open."""
    contents = reading.contents
    model, shape = model_of(reading, claims, known)
    machine = machine_of(reading, claims)
    steps, evidence = parse_with_claims(reading, replace(claims, gpus=machine.gpus))
    cautions, proven = check_model(reading, shape, evidence, claims, machine)
    notes = [*evidence.notes, *cautions]
    if taken := taken_as(claims.accelerator):
        notes.append(f"--gpu {claims.accelerator} is taken as {taken}")
    documents = " and ".join(["packed"] * packs(contents.arguments) + ["padded"] * pads(contents.arguments)) or None
    engine = dialect.name if dialect else "unknown"  # it failed before its log showed the framework
    return steps, RunRecord(
        run_id=f"{model}-{engine}-{(log.sha256 or '')[:12]}",
        model=model,
        strategy=None,
        engine=engine,
        workload=Workload(
            shape=proven, global_batch_sequences=claims.global_batch_sequences, sequence_tokens=claims.sequence_tokens
        ),
        machine=machine,
        started_at=None,
        clock="framework",
        outcome="running",
        evidence=with_facts(evidence, documents=documents, notes=tuple(notes)),
        engine_options=options_of(contents.arguments),
    )


def parsed_log(contents: LogContents, claims: Claims) -> tuple[tuple[StepRecord, ...], Evidence, tuple[str, ...]]:
    """Return steps, evidence and notes of an attempt.

    The claims fill in what the log does not state; where both do, they must agree (the caller checks).
    """
    evidence, evidence_notes = evidence_of(contents)
    claims = with_evidence(claims, evidence)
    times, notes = timing.step_times(contents, claims)
    corrected, seconds, loss, note = timing.correct_second(contents, claims) or (0, None, None, "")
    if times.get(corrected) is not None:
        times[corrected] = seconds
        notes.append(note)
    steps, allocated, reserved = [], None, None
    for step in contents.steps.values():
        # Megatron reports peaks after its first lines only; later steps allocate the same.
        allocated = _count_or_none(step.peak_allocated_bytes) or allocated
        reserved = _count_or_none(step.peak_reserved_bytes) or reserved
        if (seconds := times[step.step]) is not None:
            record = step_record(step, seconds, claims, loss if step.step == corrected else None)
            steps.append(replace(record, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved))
    return tuple(steps), evidence, (*notes, *evidence_notes)


def evidence_of(contents: LogContents) -> tuple[Evidence, list[str]]:
    """Return what the log proves, with notes. An fp8 argument proves nothing without Transformer Engine: Megatron ignores it."""
    evidence: dict[str, Any] = {name: value for name, value in contents.evidence.items() if name != "nodes"}  # of the machine
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
    of_ranks = [evidence.pop(name) for name in list(evidence) if name.startswith(RANK_PARAMETERS)]
    if of_ranks and degrees[0] and degrees[2] in {None, 1} and len(of_ranks) == degrees[0] * (degrees[1] or 1):
        evidence.setdefault("parameters", sum(of_ranks))
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


def parse_with_claims(reading: LogReading, claims: Claims) -> tuple[tuple[StepRecord, ...], Evidence]:
    """Return steps and evidence, with the sequence length from printed rates where the log does not state it."""
    contents = reading.contents
    derived = None if "sequence_tokens" in contents.evidence else sequence_from_rates(contents, claims.gpus)
    first = next((step.line for step in contents.steps.values()), None)
    check_claim("--sequence-length", claims.sequence_tokens, derived, f"{reading.name}:{first}")
    claims = replace(claims, sequence_tokens=claims.sequence_tokens or derived)
    known = with_evidence(claims, evidence_of(contents)[0])
    if known.global_batch_sequences is None or known.sequence_tokens is None:
        claims = replace(claims, tokens_per_step=timing.tokens_by_rates(contents, known.gpus))
    steps, evidence, notes = parsed_log(contents, claims)
    if claims.tokens_per_step is not None and steps:
        notes = (*notes, f"{claims.tokens_per_step} tokens a step follow from the printed rates and times")
    if derived is not None:
        notes = (*notes, f"a sequence length of {derived} tokens follows from the printed rates and times")
    if contents.device_used_bytes is not None:
        used = units.gibibytes(contents.device_used_bytes)
        notes = (*notes, f"at most {used} in use on one device, including other processes")
    elif contents.device_used_share is not None:
        used = units.percent(contents.device_used_share)
        notes = (*notes, f"at most {used} of the memory of one device in use, including other processes")
    if contents.steps and not steps:
        notes = (*notes, timing.without_times(contents, known))
    sequence = evidence.workload.sequence_tokens or derived
    evidence = with_products(with_facts(evidence, sequence_tokens=sequence), claims.gpus)
    return steps, replace(evidence, notes=(*evidence.notes, *notes))


def sequence_from_rates(contents: LogContents, gpus: int | None) -> int | None:
    """Return the tokens of a sequence, from lines that print the time and the token rate of the same step.

    tokens/s/GPU x seconds x GPUs / sequences. With the five digits that Primus prints every step is a multiple of 64;
    with the four digits of NeMo the median of steps comes close to one of TOKENS_UNIT. Fewer digits give None.
    """
    claims = Claims(global_batch_sequences=contents.evidence.get("global_batch_sequences"))
    lengths = [
        tokens * (gpus or 0) / batch
        for step, tokens in timing.tokens_of_rates(contents, gpus)
        if step.is_printed and (batch := timing.batch_of(step, claims))
    ]
    exact = {timing.near_multiple([length], 64, 1e-4) for length in lengths}  # of each step
    if len(exact) == 1 and None not in exact:
        return exact.pop()
    return timing.near_multiple(lengths, timing.TOKENS_UNIT, 1e-3)  # of the median


def step_record(step: LoggedStep, seconds: float, claims: Claims, loss: float | None = None) -> StepRecord:
    """Return the record of one logged step, whose own loss may differ from the printed one."""
    return StepRecord(
        step=step.step,
        step_seconds=seconds,
        tokens=timing.tokens_of(step, claims),
        loss=finite_or_none(step.loss if loss is None else loss),
        grad_norm=finite_or_none(step.grad_norm),
        learning_rate=finite_or_none(step.learning_rate),
        finite=step.finite,
        peak_allocated_bytes=_count_or_none(step.peak_allocated_bytes),
        peak_reserved_bytes=_count_or_none(step.peak_reserved_bytes),
    )


def _count_or_none(value: int | None) -> int | None:
    return value if value is not None and 0 <= value <= LARGEST_WHOLE else None


def _attempt_notes(reading: LogReading) -> list[str]:
    every, notes = len(reading.ended) + 1, []
    for number, attempt in list(enumerate(reading.ended, 1))[-MOST["attempts"] :]:
        last, failure = attempt.contents, attempt.failure
        place = f"after step {last.newest}" if last.steps else "before its first step"
        how = f"ended {place} without saying why"
        if is_complete(last):
            how = f"completed {place}"
        elif failure is not None:
            how = f"{failure.outcome.replace('_', ' ')} {place}: {failure.cause}" + (f" ({failure.hint})" if failure.hint else "")
        notes.append(f"attempt {number} of {every}: {how}")
    return notes


def is_complete(contents: LogContents) -> bool:
    """Whether an attempt says that training is done, or has reached its last step."""
    return contents.finished or (contents.total_steps is not None and contents.newest >= contents.total_steps > 0)


def _ending_of(reading: LogReading, steps: Sequence[StepRecord], dialect: Dialect | None) -> Failure:
    contents = reading.attempts.latest
    total, last = contents.total_steps, contents.newest
    first_steps = islice(contents.steps.values(), MOST["scale_searches"])
    searching = max((step.step for step in takewhile(lambda step: step.skips, first_steps)), default=0)
    steps = [step for step in steps if step.step > searching]
    completed = diverging(steps) or Failure(outcome="completed", cause="")
    if is_complete(contents):
        return completed
    if failure := reading.failure(steps):
        return failure
    if not contents.steps:
        return Failure(outcome="failed", cause="The log ends before the first step without saying why.")
    if total is None and not (dialect and dialect.marks_its_end):
        return completed
    planned = "" if total is None else f" of {total}"
    return Failure(outcome="interrupted", cause=f"The log ends after step {last}{planned} without saying why.")
