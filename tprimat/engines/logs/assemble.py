"""From what a log said to records: times corrected or derived, tokens counted, and notes on what a reader must know."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tprimat.engines.logs.collect import Collection
from tprimat.engines.logs.logged import LOGGED_ROW, LoggedStep
from tprimat.engines.logs.times import Correction, Workload, batches, correct_second, seconds_of, survey
from tprimat.record.schema import Evidence, StepRecord
from tprimat.record.steps import ABSENT, STEP_ROW, StepTable, record_of
from tprimat.record.table import Rows

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
