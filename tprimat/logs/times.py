"""The time of each step of a log: as printed, or from a rate; which times are no measure of a steady step, and why."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

from tprimat.core.limits import LARGEST_WHOLE, LONGEST_SECONDS, SHORTEST_SECONDS
from tprimat.logs.claims import Claims
from tprimat.logs.contents import LogContents, LoggedStep

SLOW_FIRST_LINE = 1.05
"""Times the median of the other lines, from which the first line of a log that begins later than step 1 holds start-up."""
MOST_NAMES = 10
Times = dict[int, float | None]
"""Step -> its seconds; None where it has no time that counts."""
LeftOut = tuple[Sequence[int], str | None]
"""Steps whose times do not count, and a note that says why."""


def batch_of(step: LoggedStep, claims: Claims) -> int | None:
    """Return the sequences of a step: as logged with the step, else those of the run."""
    batch = step.global_batch_sequences
    return batch if batch is not None and 0 < batch <= LARGEST_WHOLE else claims.global_batch_sequences or None


def tokens_of(step: LoggedStep, claims: Claims) -> int | None:
    """Return the tokens of a step, with the sequence length as logged with the step, else that of the run."""
    batch, sequence = batch_of(step, claims), step.sequence_tokens or claims.sequence_tokens
    return batch * sequence if batch and sequence else None


def seconds_of(step: LoggedStep, claims: Claims) -> float | None:
    """Return the time of a step: as printed, or derived from a rate over this step where its work is known."""
    if step.is_printed:
        return plausible(step.step_seconds)
    seconds = quotient(batch_of(step, claims), step.sequences_per_second)
    if seconds is None and claims.gpus and step.tokens_per_second_per_gpu is not None:
        seconds = quotient(tokens_of(step, claims), step.tokens_per_second_per_gpu * claims.gpus)
    return plausible(seconds)


def plausible(seconds: float | None) -> float | None:
    """Return a time that a step can take."""
    return seconds if seconds is not None and SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS else None


def quotient(amount: float | None, rate: float | None) -> float | None:
    """Divide an amount by a rate; None where one is absent or the result is not a finite number."""
    if amount is None or not rate or not math.isfinite(rate):
        return None
    seconds = amount / rate
    return seconds if math.isfinite(seconds) else None


def step_times(contents: LogContents, claims: Claims) -> tuple[Times, list[str]]:
    """Return the time of each step, and notes on where the times come from and which are left out.

    One log has one clock: where it prints times, a rate of samples alone (DeepSpeed's timer) gives none.
    """
    logged = list(contents.steps.values())
    times: Times = {step.step: seconds_of(step, claims) for step in logged}
    notes = timing_notes(logged, times)
    for rule in (rates_beside_times, restarts, other_batches, other_sequences, first_line):
        left_out, note = rule(logged, claims, times)
        times |= dict.fromkeys(left_out)
        notes += [note] if note else []
    return times, notes


def rates_beside_times(logged: Sequence[LoggedStep], _: Claims, __: Times) -> LeftOut:
    """Leave out steps with a rate of samples alone in a log that prints times."""
    if not any(step.is_printed for step in logged):
        return (), None
    rates = [step.step for step in logged if not step.is_printed and step.sequences_per_second]
    return rates, (rates and f"left out, with a rate of the framework's timer and no time: {names_of(rates)}") or None


def restarts(logged: Sequence[LoggedStep], _: Claims, times: Times) -> LeftOut:
    """Leave out the first step of each process that started again."""
    steps = [step.step for step in logged if step.restarted and times[step.step] is not None]
    return steps, f"left out, since a process started again in it: {names_of(steps)}" if steps else None


def other_batches(logged: Sequence[LoggedStep], claims: Claims, _: Times) -> LeftOut:
    """Leave out steps of another global batch than the last one, as in a batch ramp-up.

    A line for several steps prints the batch of the last of them. It counts where the samples consumed since the line before show
    that all had this batch, or where that line had it.
    """
    batches = {step.step: batch_of(step, claims) for step in logged}
    sizes = {batch for batch in batches.values() if batch is not None}
    if len(sizes) < 2:
        return (), None
    steady = batches[logged[-1].step]
    left_out = [step.step for step in logged if batches[step.step] != steady]
    left_out += [
        step.step
        for former, step in pairwise(logged)
        if batches[former.step] != steady == batches[step.step]
        and step.step - former.step > 1
        and mean_batch(former, step) != steady
    ]
    changes = f"the global batch changes from {min(sizes)} to {max(sizes)} sequences"
    return left_out, f"{changes}: only steps with the last, {steady}, count; left out: {names_of(sorted(left_out))}"


def other_sequences(logged: Sequence[LoggedStep], _: Claims, __: Times) -> LeftOut:
    """Leave out steps with sequences of another length than the last ones, as in curriculum learning.

    A line for several steps prints the length of the last of them.
    """
    lengths = [step.sequence_tokens for step in logged if step.sequence_tokens]
    if len(set(lengths)) < 2:
        return (), None
    left_out = {step.step for step in logged if step.sequence_tokens != lengths[-1]}
    left_out |= {step.step for former, step in pairwise(logged) if former.step in left_out and step.step - former.step > 1}
    changes = f"sequences grow or shrink from {lengths[0]} to {lengths[-1]} tokens"
    return sorted(left_out), f"{changes}: only steps with the last length count; left out: {names_of(sorted(left_out))}"


def first_line(logged: Sequence[LoggedStep], _: Claims, times: Times) -> LeftOut:
    """Leave out the first line where it holds the start of a process although its number is not 1.

    Step 1 is left out of every analysis. So is a first line for several steps, which is a mean with step 1. A log that begins
    later is resumed or cut, and only its times can tell: a resumed process starts slowly.
    """
    if not logged or logged[0].step == 1 or (seconds := times[logged[0].step]) is None:
        return (), None
    first = logged[0].step
    rest = [later for step in logged[1:] if (later := times[step.step]) is not None]
    if 1 < first <= interval_of(logged) and logged[0].is_mean:
        return ((first,), f"left out, since it is a mean with start-up: step {first}") if rest else ((), None)
    begins = f"the log begins at step {first}"
    if not rest:
        return (), f"{begins} and has one line: nothing tells whether its time holds start-up"
    slowness = seconds / statistics.median(rest)
    if slowness > SLOW_FIRST_LINE and seconds > max(rest):
        return (first,), f"{begins}, which takes {slowness:.2f} times as long as the others: left out as start-up"
    return (), f"{begins}, which is no slower than the others: it counts"


def mean_batch(former: LoggedStep, step: LoggedStep) -> float | None:
    """Return the mean global batch of the steps since the line before, by the samples consumed; None where not printed."""
    if former.consumed_sequences is None or step.consumed_sequences is None or step.begins:
        return None
    return (step.consumed_sequences - former.consumed_sequences) / (step.step - former.step)


def names_of(steps: Sequence[int]) -> str:
    """Return 'steps 2, 3', of many steps the first ones and how many more."""
    more = len(steps) - MOST_NAMES
    numbers = ", ".join(map(str, steps[:MOST_NAMES]))
    return f"step{'s' if len(steps) > 1 else ''} {numbers}" + (f" and {more} more" if more > 0 else "")


def timing_notes(logged: Sequence[LoggedStep], times: Mapping[int, float | None]) -> list[str]:
    """Say where the step times come from."""
    notes = []
    if any(times[step.step] is not None and not step.is_printed for step in logged):
        notes.append("step times are derived from printed rates, with the digits that those have")
    gap = interval_of(logged)
    if gap > 1:
        means = any(step.is_mean for step in logged)
        notes.append(f"the log has one line for {gap} steps" + ("; each time is the mean over them" if means else ""))
    if lost := [former.step + gap for former, later in pairwise(logged) if not former.begins and later.step > former.step + gap]:
        notes.append(f"lines are missing in the log: from {names_of(lost)} on")
    if untimed := sum(seconds is None for seconds in times.values()):
        notes.append(f"logged steps without a time, which are left out: {untimed}")
    return notes


def interval_of(logged: Sequence[LoggedStep]) -> int:
    """Return how many steps a line stands for: the most frequent distance between lines.

    The first line of a process may stand for fewer: torchtitan prints step 1, then 10, 20, and so on.
    """
    pairs = list(pairwise(logged))
    settled = [(former, later) for former, later in pairs if not former.begins]
    return min(statistics.multimode([later.step - former.step for former, later in settled or pairs] or [1]))
