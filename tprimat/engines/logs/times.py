"""When the steps of a log took how long: as printed, derived from rates, or freed from the mean that Megatron-LM prints."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tprimat.engines.logs.collect import Collection
from tprimat.engines.logs.logged import LARGEST, LOGGED_ROW, LoggedStep
from tprimat.record.steps import ABSENT
from tprimat.record.table import Rows

LOOKED_AT = 100
"""First steps among which there is a third with a time, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step trains on, as far as the log or the user tells."""

    gpus: int | None = None
    global_batch_sequences: int | None = None
    sequence_tokens: int | None = None


def batches(rows: Rows, workload: Workload) -> NDArray[np.int64]:
    """Sequences of each step; ABSENT where nothing tells."""
    return np.where(rows["batch"] > 0, rows["batch"], workload.global_batch_sequences or ABSENT)


def seconds_of(rows: Rows, workload: Workload) -> NDArray[np.float64]:
    """As printed, or derived from a rate over the step alone when the work of the step is known; NaN without either."""
    batch, sequence, gpus = batches(rows, workload), workload.sequence_tokens, workload.gpus
    by_sequences, by_tokens = rows["sequences_per_second"], rows["tokens_per_second_per_gpu"]
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(batch > 0, batch / by_sequences, np.nan)
        if sequence and gpus:
            derived = np.where(batch > 0, batch * sequence / (by_tokens * gpus), np.nan)
            times = np.where(np.isfinite(times), times, derived)
    times = np.where(np.isnan(rows["seconds"]), times, rows["seconds"])
    return np.where(np.isfinite(times) & (times > 0), times, np.nan)


def survey(said: Collection, workload: Workload) -> list[str]:
    """Notes on where the times come from."""
    notes, untimed, derived, means = [], 0, False, False
    gap, before = None, np.empty(0, np.int64)
    for rows in said.blocks():
        missing, printed = np.isnan(seconds_of(rows, workload)), ~np.isnan(rows["seconds"])
        untimed += int(missing.sum())
        derived = derived or bool((~printed & ~missing).any())
        means = means or bool((rows["mean_since_reset"] | (~printed & (rows["tokens_per_second_per_gpu"] > 0))).any())
        gaps = np.diff(np.concatenate((before, rows["step"])))
        gap, before = int(gaps.min(initial=gap or LARGEST)), rows["step"][-1:].copy()
    if derived:
        notes.append("step times are derived from printed rates, with the digits that those have")
    if gap is not None and 1 < gap < LARGEST:
        notes.append(f"the log has one line for {gap} steps" + ("; each time is the mean over them" if means else ""))
    if untimed:
        notes.append(f"{untimed} logged steps have no time and are left out")
    return notes


@dataclass(frozen=True, slots=True)
class Correction:
    """What the second line of Megatron-LM really says of its step."""

    step: int
    seconds: float | None
    """None: nothing certain."""
    loss: float | None
    note: str


def correct_second(said: Collection, workload: Workload) -> Correction | None:
    """Undo the mean in Megatron-LM's second line.

    Since core 0.16 the first line of a process resets neither timer nor losses (training_log, is_first_iteration), so the second
    prints means over both: t2 = n x mean - t1 over n - 1 steps. Older versions reset; which it was shows in the third line,
    and where there is none the second time is dropped.
    """
    logged = said.first(LOOKED_AT)
    times = [seconds for step in logged if (seconds := derived_seconds(step, workload)) is not None]
    if len(logged) < 2 or not (logged[0].mean_since_reset and logged[1].mean_since_reset):
        return None
    first, second = logged[0], logged[1]
    if derived_seconds(first, workload) is None or derived_seconds(second, workload) is None:
        return None
    count = second.step - first.step + 1
    corrected = (count * times[1] - times[0]) / (count - 1)
    if not first_line_resets_nothing(logged) or corrected <= 0:
        return None
    if len(times) == 2:
        note = f"step {second.step} is left out: its time may be a mean with step {first.step}"
        return Correction(second.step, None, None, note)
    if ratio(corrected, times[2]) >= ratio(times[1], times[2]):
        return None
    both = first.loss is not None and second.loss is not None
    loss = (count * second.loss - first.loss) / (count - 1) if both and second.loss and first.loss else None
    note = f"step {second.step}: the log prints the mean with step {first.step}; the step's own time and loss are derived"
    return Correction(second.step, corrected, loss, note)


def derived_seconds(step: LoggedStep, workload: Workload) -> float | None:
    """The time of one step, as printed or derived."""
    seconds = float(seconds_of(np.array([step.row()], LOGGED_ROW), workload)[0])
    return None if math.isnan(seconds) else seconds


def first_line_resets_nothing(logged: Sequence[LoggedStep]) -> bool:
    """Whether the first line can be that of a first iteration: with an interval above 1 it then is no multiple of it."""
    if len(logged) < 3:
        return logged[1].step - logged[0].step == 1 or logged[0].step == 1
    interval = logged[2].step - logged[1].step
    return interval == 1 or logged[0].step % interval != 0


def ratio(left: float, right: float) -> float:
    """How far apart two times are, whichever is larger."""
    return abs(math.log(left / right))
