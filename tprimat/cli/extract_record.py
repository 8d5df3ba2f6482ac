"""From a log that was read, and flags, to the record of the run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tprimat import units
from tprimat.cli.extract_checks import (
    Claim,
    Flags,
    check_flags,
    check_model,
    check_strategy,
    compare,
    first_step_line,
    machine_of,
)
from tprimat.cli.log_reading import LogReading
from tprimat.config.schema import Config
from tprimat.engines.logs.assemble import Assembled, assemble, sequence_from_rates
from tprimat.engines.logs.dialects import Dialect
from tprimat.engines.logs.times import Workload
from tprimat.errors import ConfigError
from tprimat.facts.models import ModelShape, model_shape
from tprimat.launch.failures import classify, diverging
from tprimat.launch.schema import Failure
from tprimat.record.schema import Evidence, LogSource, Machine, RunRecord, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """What a log became."""

    run: RunRecord
    steps: Sequence[StepRecord]
    notes: tuple[str, ...]


def extract(reading: LogReading, flags: Flags, source: LogSource, config: Config, *, growing: bool = False) -> Extracted:
    """The record of a log.

    Args:
        reading: the log.
        flags: the user's word.
        source: where the log came from.
        config: names models and strategies.
        growing: more is to come.

    Raises:
        ConfigError: a flag contradicts the log, or something is needed that neither says.
        RecordError: the log holds no step.
    """
    failure = None if growing else failure_of(reading, ())
    dialect = reading.check(failure.cause if failure else None)
    check_flags(reading, flags)
    machine = machine_of(reading, flags, dialect)
    made = assembled(reading, flags, machine)
    check_strategy(reading, made.evidence, flags, machine, config)
    shape = shape_of(flags.model, config)
    check_model(reading, shape, made.evidence, flags)
    ending = ending_of(reading, made.steps, dialect, growing=growing)
    run = RunRecord(
        run_id=f"{flags.model}-{dialect.name}-{(source.sha256 or 'growing')[:12]}",
        model=flags.model,
        shape=shape,
        strategy=flags.strategy,
        engine=dialect.name,
        matmul_dtype=made.evidence.matmul_dtype,
        machine=machine,
        started_at=None,
        clock="framework",
        outcome=ending.outcome,
        cause=ending.cause or None,
        hint=ending.hint,
        evidence=made.evidence,
        source=replace(source, dialect=dialect.name, truncated=source.truncated or ending.outcome == "interrupted"),
        **split_of(made.evidence, flags),
    )
    return Extracted(run=run, steps=made.steps, notes=made.evidence.notes)


def assembled(reading: LogReading, flags: Flags, machine: Machine) -> Assembled:
    """Steps and evidence, with the sequence length from printed rates where nothing else in the log tells it."""
    said = reading.said
    derived = None if "sequence_tokens" in said.evidence else sequence_from_rates(said, machine.gpus)
    compare(Claim("--sequence-length", flags.sequence_tokens, derived, first_step_line(reading)), reading.name)
    workload = Workload(
        gpus=machine.gpus,
        global_batch_sequences=flags.global_batch_sequences,
        sequence_tokens=flags.sequence_tokens or derived,
    )
    made = assemble(said, workload)
    notes = [*made.notes]
    if derived is not None:
        notes.append(f"a sequence of {derived} tokens follows from the printed rates and times")
    if said.device_used_bytes is not None:
        notes.append(f"{units.gibibytes(said.device_used_bytes)} in use on one device at most, other processes included")
    evidence = proven(made.evidence, machine.gpus, derived)
    return replace(made, evidence=replace(evidence, notes=(*evidence.notes, *notes)))


def split_of(evidence: Evidence, flags: Flags) -> dict[str, Any]:
    """The fields that the record shares with its evidence; batch and sequence may come from flags."""
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


def proven(evidence: Evidence, gpus: int | None, sequence: int | None) -> Evidence:
    """Evidence with what follows from it: the replicas that are left over, and the sequence that the rates tell."""
    tensor, pipeline, context = evidence.tensor_parallel, evidence.pipeline_parallel, evidence.context_parallel
    data = evidence.data_parallel
    if data is None and gpus and tensor and pipeline and context:
        data = gpus // (tensor * pipeline * context)
    tokens = evidence.sequence_tokens or sequence
    batch = evidence.global_batch_sequences
    return replace(
        evidence, data_parallel=data, sequence_tokens=tokens, tokens_per_step=batch * tokens if batch and tokens else None
    )


def shape_of(model: str, config: Config) -> ModelShape:
    """The architecture of a model in config.yaml, or of one that the table knows by that name.

    Raises:
        ConfigError: neither knows it.
    """
    if model in config.models:
        architecture = config.models[model].architecture
        return model_shape(architecture) if isinstance(architecture, str) else architecture
    try:
        return model_shape(model)
    except ConfigError as error:
        raise ConfigError(
            f"There is no model {model!r}.",
            where="--model-name",
            why=error.why,
            fix=f"{', '.join(config.models)}, or {error.fix}",
        ) from error


def failure_of(reading: LogReading, steps: Sequence[StepRecord]) -> Failure | None:
    """Why the run failed, where its log tells."""
    lines = reading.failure_lines()
    found = classify(1, lines, steps) if lines else None
    if found is None or (found.kind is None and not any("Traceback (most recent call last)" in line for line in lines)):
        return None
    return found


def ending_of(reading: LogReading, steps: Sequence[StepRecord], dialect: Dialect, *, growing: bool) -> Failure:
    """How the run ended, as far as the log tells."""
    said = reading.said
    last = said.newest
    if said.finished or (said.total_steps is not None and last >= said.total_steps):
        return diverging(steps) or Failure(outcome="completed", cause="")
    if growing:
        return Failure(outcome="running", cause="")
    if failure := failure_of(reading, steps):
        return failure
    if said.total_steps is None and not dialect.marks_its_end:
        return diverging(steps) or Failure(outcome="completed", cause="")
    planned = "" if said.total_steps is None else f" of {said.total_steps}"
    return Failure(outcome="interrupted", cause=f"The log ends after step {last}{planned}, without a word on the end.")
