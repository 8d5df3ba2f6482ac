"""From what a log said to records: times corrected or derived, tokens counted, and notes on what a reader must know."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tprimat import units
from tprimat.config.schema import Config, LayoutConfig
from tprimat.errors import ConfigError
from tprimat.facts.accelerators import find_accelerator
from tprimat.facts.flops import parameters
from tprimat.facts.models import ModelShape, model_shape, padded_vocabulary
from tprimat.facts.platforms import PLATFORM_OF, Backend
from tprimat.logs.failures import Failure, classify, diverging
from tprimat.logs.parse import Dialect, LogReading
from tprimat.logs.steps import (
    LOGGED_ROW,
    Collection,
    Correction,
    LoggedStep,
    Workload,
    batches,
    correct_second,
    seconds_of,
    survey,
)
from tprimat.records.schema import Evidence, LogSource, Machine, RunRecord, StepRecord
from tprimat.records.steps import ABSENT, STEP_ROW, StepTable, record_of
from tprimat.records.table import Rows

SEQUENCE_UNIT = 64
"""Sequence lengths in training are multiples of it; a derived one must come close to such a multiple to be believed."""
SEQUENCE_TOLERANCE = 1e-4
MOST_RECORDS = 100_000
"""More steps stay in a table, where each costs a few numbers instead of an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A log as records."""

    steps: Sequence[StepRecord]
    evidence: Evidence
    notes: tuple[str, ...]


def assemble(said: Collection, workload: Workload) -> Assembled:
    """Records from a collection.

    Args:
        said: all lines of the log.
        workload: fills what the log does not say; where both speak they must agree (the caller checks).
    """
    workload = known(said, workload)
    correction, time_notes = correct_second(said, workload), survey(said, workload)
    table = StepTable()
    for rows in said.blocks():
        table.table.append(step_rows(rows, workload, correction))
    table, memory_notes = carry_peaks(table)
    notes = [*time_notes, *((correction.note,) if correction else ()), *memory_notes]
    if said.restarts:
        notes.append(f"the log holds {said.restarts + 1} attempts; steps that were repeated count once, as they went last")
    evidence, more = final_evidence(said)
    steps = tuple(table) if len(table) <= MOST_RECORDS else table
    return Assembled(steps=steps, evidence=evidence, notes=(*notes, *more))


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


def record(step: LoggedStep, seconds: float, workload: Workload) -> StepRecord:
    """One step, as its line tells it."""
    rows = step_rows(np.array([step.row()], LOGGED_ROW), workload, None)
    return replace(record_of(rows[0].item()), step_seconds=seconds)


def step_rows(rows: Rows, workload: Workload, correction: Correction | None) -> Rows:
    """Rows of STEP_ROW for the logged steps that have a time."""
    made = np.empty(len(rows), STEP_ROW)
    batch, sequence = batches(rows, workload), workload.sequence_tokens
    made["tokens"] = np.where(batch > 0, batch * sequence, ABSENT) if sequence else ABSENT
    made["step_seconds"] = seconds_of(rows, workload)
    for name in ("step", "loss", "grad_norm", "learning_rate", "finite"):
        made[name] = rows[name]
    made["peak_allocated_bytes"], made["peak_reserved_bytes"] = rows["allocated"], rows["reserved"]
    made["ended_at_seconds"] = np.nan
    if correction is not None and made["step"][0] <= correction.step <= made["step"][-1]:
        place = made["step"] == correction.step
        made["step_seconds"][place] = np.nan if correction.seconds is None else correction.seconds
        if correction.loss is not None:
            made["loss"][place] = correction.loss
    timed: Rows = made[~np.isnan(made["step_seconds"])]
    return timed


def carry_peaks(steps: StepTable) -> tuple[StepTable, list[str]]:
    """Megatron reports the allocator's peak after two steps only. Later steps allocate alike: they carry it, as a note says."""
    reported, last = None, None
    for block in steps.table.blocks():
        known = block["step"][block["peak_allocated_bytes"] != ABSENT]
        reported, last = int(known[-1]) if len(known) else reported, int(block["step"][-1])
    if reported is None or reported == last:
        return steps, []
    carried, before = StepTable(), {"peak_allocated_bytes": ABSENT, "peak_reserved_bytes": ABSENT}
    for block in steps.table.blocks():
        rows = block.copy()
        for name, value in before.items():
            rows[name] = filled(rows[name], value)
            before[name] = int(rows[name][-1])
        carried.table.append(rows)
    return carried, [f"peak memory was reported last after step {reported}; later steps carry that value"]


def filled(values: NDArray[np.int64], before: int) -> NDArray[np.int64]:
    """Each absent value replaced by the last known one."""
    latest = np.maximum.accumulate(np.where(values > 0, np.arange(len(values)), -1))
    made: NDArray[np.int64] = np.where(latest < 0, before, values[latest])
    return made


def sequence_from_rates(said: Collection, gpus: int | None) -> int | None:
    """Tokens a sequence, from lines that print the time and the token rate of the same step.

    tokens/s/GPU x seconds x GPUs / sequences. With the five digits that Primus prints this is exact; rates with fewer digits do
    not come close enough to a whole multiple and give None.
    """
    found: set[int | None] = set()
    for rows in said.blocks() if gpus else ():
        batch = batches(rows, Workload(global_batch_sequences=said.evidence.get("global_batch_sequences")))
        rate, seconds = rows["tokens_per_second_per_gpu"], rows["seconds"]
        told = (seconds > 0) & (rate > 0) & (batch > 0) & ~rows["mean_since_reset"]
        tokens = rate[told] * seconds[told] * gpus / batch[told]
        nearest = np.round(tokens / SEQUENCE_UNIT) * SEQUENCE_UNIT
        exact = (nearest > 0) & (np.abs(tokens - nearest) < SEQUENCE_TOLERANCE * nearest)
        found |= {int(count) for count in np.unique(nearest[exact])} | ({None} if not exact.all() else set())
    return found.pop() if len(found) == 1 else None


# Flags beside the log: they fill what it does not say, and may not contradict it.

PARAMETER_TOLERANCE = 0.01
"""Padding of the vocabulary differs between frameworks."""
ONE_NODE_GPUS = 8
"""Up to so many GPUs are taken to stand in one node unless --num-nodes says otherwise; only per-node figures depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the user says. None: nothing."""

    model: str
    gpus: int | None = None
    nodes: int | None = None
    global_batch_sequences: int | None = None
    sequence_tokens: int | None = None
    accelerator: str | None = None
    strategy: str | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A flag beside what the log says."""

    flag: str
    asked: int | str | None
    logged: int | str | None
    line: int | None


def compare(claim: Claim, log: str) -> None:
    """Refuse a flag that the log contradicts.

    Raises:
        ConfigError: names both values and the line.
    """
    if claim.asked is None or claim.logged is None or claim.asked == claim.logged:
        return
    raise ConfigError(
        f"{claim.flag} {claim.asked} contradicts the log, which says {claim.logged}.",
        where=f"{log}:{claim.line}" if claim.line else log,
        why="A record keeps what ran.",
        fix=f"leave {claim.flag} out, or give {claim.logged}",
    )


def check_flags(reading: LogReading, flags: Flags) -> None:
    """Every flag that the log speaks about."""
    said, line = reading.said.evidence, reading.said.evidence_line.get
    compare(Claim("--num-gpus", flags.gpus, world_size(said), line("world_size") or line("tensor_parallel")), reading.name)
    for flag, asked, name in (
        ("--global-batch-size", flags.global_batch_sequences, "global_batch_sequences"),
        ("--sequence-length", flags.sequence_tokens, "sequence_tokens"),
    ):
        compare(Claim(flag, asked, said.get(name), line(name)), reading.name)
    gpu, printed = flags.accelerator, reading.said.accelerator
    if gpu and printed:
        known = find_accelerator(printed)
        if known is None or find_accelerator(gpu) is not known:
            compare(Claim("--gpu", gpu, printed, line("accelerator")), reading.name)


def first_step_line(reading: LogReading) -> int | None:
    """Line of the first step."""
    return reading.said.first_line


def machine_of(reading: LogReading, flags: Flags, dialect: Dialect) -> Machine:
    """The hardware, as far as the log or the flags tell; never the machine that reads the log."""
    name = reading.said.accelerator or flags.accelerator
    gpus = world_size(reading.said.evidence) or flags.gpus
    platform = platform_of(name) or dialect.platform
    if platform is None:
        raise ConfigError(
            f"The log does not tell which GPU ran{f', and {name!r} is not known' if name else ''}.",
            where=reading.name,
            why="A result belongs to the hardware that made it, which may be another than this machine.",
            fix="--gpu with the name that torch or the SMI tool shows, such as --gpu 'NVIDIA H100 80GB HBM3' or --gpu MI300X",
        )
    vendor_platform = dialect.platform
    if vendor_platform is not None and platform != vendor_platform:
        raise ConfigError(
            f"--gpu {name} contradicts the log, which {dialect.name} wrote.",
            where=f"{reading.name}:{first_step_line(reading)}",
            why=f"{dialect.name} runs on {PLATFORM_OF[vendor_platform].upper()} accelerators only.",
        )
    nodes = flags.nodes or (1 if gpus is not None and gpus <= ONE_NODE_GPUS else None)
    if gpus is not None and nodes is None:
        raise ConfigError(
            f"The log does not tell over how many nodes its {gpus} GPUs are spread.", where=reading.name, fix="--num-nodes N"
        )
    if gpus is not None and nodes is not None and gpus % nodes:
        raise ConfigError(f"--num-nodes {nodes} does not divide {gpus} GPUs.", where="--num-nodes")
    return Machine(
        platform=platform,
        accelerator=name,
        gpus_per_node=None if gpus is None or nodes is None else gpus // nodes,
        nodes=nodes,
    )


def platform_of(accelerator: str | None) -> Backend | None:
    """By the table of accelerators, else by the vendor's name in it."""
    if accelerator is None:
        return None
    known = find_accelerator(accelerator)
    if known is not None:
        return known.backend
    words = accelerator.lower()
    if "nvidia" in words:
        return "cuda"
    return "rocm" if "amd" in words or "instinct" in words else None


def check_strategy(reading: LogReading, evidence: Evidence, flags: Flags, machine: Machine, config: Config) -> None:
    """A strategy is a claim about the split: where config.yaml says what it means, the log must agree."""
    if flags.strategy is None:
        return
    if flags.strategy not in config.parallelism:
        raise ConfigError(
            f"There is no strategy {flags.strategy!r}.", where="--parallel", fix=f"one of {', '.join(config.parallelism)}"
        )
    layout = config.parallelism[flags.strategy].get(flags.model, {}).get(PLATFORM_OF[machine.platform])
    for wanted, name in split_claims(layout):
        logged = getattr(evidence, name)
        line = reading.said.evidence_line.get(name)
        if logged is not None and logged != wanted:
            raise ConfigError(
                f"--parallel {flags.strategy} contradicts the log: it means {name} {wanted}, the log says {logged}.",
                where=f"{reading.name}:{line}" if line else reading.name,
                why="A strategy is what ran, not what was asked for.",
                fix="leave --parallel out, or name the strategy that ran",
            )


def check_model(reading: LogReading, shape: ModelShape, evidence: Evidence, flags: Flags) -> None:
    """The model decides on FLOP and MFU: where the log counts its parameters, they must be those of the shape."""
    counted, line = evidence.parameters, reading.said.evidence_line.get("parameters")
    expected = parameters(replace(shape, vocabulary=padded_vocabulary(shape))).total
    if counted is None or abs(counted / expected - 1) <= PARAMETER_TOLERANCE:
        return
    raise ConfigError(
        f"--model-name {flags.model} contradicts the log: {shape.name} has {expected:,} parameters, the log counts {counted:,}.",
        where=f"{reading.name}:{line}" if line else reading.name,
        why="FLOP and MFU follow from the model.",
        fix="the model that ran, or its architecture under models in config.yaml",
    )


def split_claims(layout: LayoutConfig | None) -> Sequence[tuple[int, str]]:
    """What a layout says, as fields of Evidence."""
    if layout is None:
        return ()
    return (
        (layout.tensor_model_parallel_size, "tensor_parallel"),
        (layout.pipeline_model_parallel_size, "pipeline_parallel"),
        (layout.context_parallel_size, "context_parallel"),
    )


# From a log that was read, and flags, to the record of the run.


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
