"""The time of each step of a log: as printed, or from a rate; which times are no measure of a steady step, and why."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

from tprimat.core.limits import LARGEST_WHOLE, LONGEST_SECONDS, SHORTEST_SECONDS, finite_or_none
from tprimat.logs.contents import FLAGS, Claims, LogContents, LoggedStep
from tprimat.logs.fields import MOST

TOKENS_UNIT = 1024
"""Tokens of a GPU in a step are multiples of it, as of any usual sequence length."""
Times = dict[int, float | None]
"""Step -> its seconds; None where it has no time that counts."""
LeftOutSteps = tuple[Sequence[int], str]
"""Steps whose times do not count, and a note that says why."""


def batch_of(step: LoggedStep, claims: Claims) -> int | None:
    """Return the sequences of a step: as logged with the step, else those of the run."""
    batch = step.global_batch_sequences
    return batch if batch is not None and 0 < batch <= LARGEST_WHOLE else claims.global_batch_sequences or None


def tokens_of(step: LoggedStep, claims: Claims) -> int | None:
    """Return the tokens of a step, with the sequence length as logged with the step, else that of the run."""
    batch, sequence = batch_of(step, claims), step.sequence_tokens or claims.sequence_tokens
    return batch * sequence if batch and sequence else claims.tokens_per_step


def rate_of(step: LoggedStep, gpus: int | None) -> float | None:
    """Return the tokens/s of a GPU that a line prints, or its share of the rate of all."""
    every = step.tokens_per_second / gpus if step.tokens_per_second and gpus else None
    rate = finite_or_none(step.tokens_per_second_per_gpu or every)
    return rate if rate and rate > 0 else None


def seconds_of(step: LoggedStep, claims: Claims) -> float | None:
    """Return the time of a step: as printed, or derived from a rate over this step where its work is known."""
    if step.is_printed:
        return _plausible(step.step_seconds)
    seconds = quotient(batch_of(step, claims), step.sequences_per_second)
    if seconds is None and claims.gpus and (rate := rate_of(step, claims.gpus)):
        seconds = quotient(tokens_of(step, claims), rate * claims.gpus)
    return _plausible(quotient(tokens_of(step, claims), step.tokens_per_second) if seconds is None else seconds)


def tokens_of_rates(contents: LogContents, gpus: int | None) -> list[tuple[LoggedStep, float]]:
    """Return steps with the tokens of a GPU by their rate and printed time; in a log without times by the stamps of lines."""
    steps = list(contents.steps.values())
    timed = [(step, step.step_seconds) for step in steps if step.is_printed]
    if not timed:
        timed = [
            (step, (step.stamp - former.stamp) / (step.step - former.step))
            for former, step in pairwise(steps)
            if former.stamp and step.stamp
        ]
        timed = timed if len(timed) > 2 else []  # stamps have milliseconds
    return [(step, rate * seconds) for step, seconds in timed if seconds and seconds > 0 and (rate := rate_of(step, gpus))]


def tokens_by_rates(contents: LogContents, gpus: int | None) -> int | None:
    """Return the tokens of a step by the rates of its lines and their times."""
    tokens = [of_gpu for _, of_gpu in tokens_of_rates(contents, gpus)]
    nearest = near_multiple(tokens, TOKENS_UNIT, 0.005)  # stamps have milliseconds
    return nearest * gpus if nearest and gpus else None


def near_multiple(values: Sequence[float], unit: int, tolerance: float) -> int | None:
    """Return the multiple of a unit that the median of values comes close to."""
    middle = statistics.median(values) if values and all(map(math.isfinite, values)) else 0.0
    nearest = round(middle / unit) * unit
    return nearest if nearest and abs(middle - nearest) < min(tolerance * nearest, unit / 4) else None


def _plausible(seconds: float | None) -> float | None:
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
    notes = _timing_notes(logged, times)
    for rule in (rates_beside_times, other_work, first_line):
        left_out, note = rule(logged, claims, times)
        times |= dict.fromkeys(left_out)
        notes += [note] if note else []
    return times, notes


def rates_beside_times(logged: Sequence[LoggedStep], _: Claims, __: Times) -> LeftOutSteps:
    """Leave out steps with a rate of samples alone in a log that prints times."""
    rates = [step.step for step in logged if not step.is_printed and step.sequences_per_second]
    if not rates or not any(step.is_printed for step in logged):
        return (), ""
    return rates, f"left out, with a rate of the framework's timer and no time: {names_of(rates)}"


def other_work(logged: Sequence[LoggedStep], claims: Claims, _: Times) -> LeftOutSteps:
    """Leave out steps of another global batch or sequence length than the last one, as in a ramp-up or in curriculum learning.

    A line for several steps prints the work of the last of them. It counts where the line before had the same.
    """
    work = {step.step: (batch_of(step, claims), step.sequence_tokens) for step in logged}
    steady = work[logged[-1].step] if logged else ()

    def differs(step: LoggedStep) -> bool:
        return any(one not in {None, last} for one, last in zip(work[step.step], steady, strict=True) if last is not None)

    left_out = {step.step for step in logged if differs(step)}
    left_out |= {step.step for former, step in pairwise(logged) if differs(former) and step.step - former.step > 1}
    if not left_out:
        return (), ""
    former, last = (
        [f"{count} {unit}" for count, unit in zip(one, ("sequences", "tokens"), strict=True) if count]
        for one in (work[min(left_out)], steady)
    )
    changes = f"the work of a step changes from {' of '.join(former)} to {' of '.join(last)}"
    return sorted(left_out), f"{changes}: only steps with the last count; left out: {names_of(sorted(left_out))}"


def first_line(logged: Sequence[LoggedStep], _: Claims, times: Times) -> LeftOutSteps:
    """Leave out the first line where it holds the start of a process although its number is not 1.

    Step 1 is left out of every analysis. So is a first line for several steps, which is a mean with step 1. A log that begins
    later is resumed or cut, and only its times can tell: a resumed process starts slowly.
    """
    if not logged or logged[0].step == 1 or (seconds := times[logged[0].step]) is None:
        return (), ""
    first = logged[0].step
    rest = [later for step in logged[1:] if (later := times[step.step]) is not None]
    if 1 < first <= interval_of(logged) and logged[0].is_mean:
        return ((first,), f"left out, since it is a mean with start-up: step {first}") if rest else ((), "")
    begins = f"the log begins at step {first}"
    if not rest:
        return (), f"{begins} and has one line: nothing tells whether its time holds start-up"
    slowness = seconds / statistics.median(rest)
    if slowness > 1.05 and seconds > max(rest):  # holds start-up
        return (first,), f"{begins}, which takes {slowness:.2f} times as long as the others: left out as start-up"
    return (), f"{begins}, which is no slower than the others: it counts"


def names_of(steps: Sequence[int]) -> str:
    """Return 'steps 2, 3', of many steps the first ones and how many more."""
    more = len(steps) - MOST["steps"]
    numbers = ", ".join(map(str, steps[: MOST["steps"]]))
    return f"step{'s' if len(steps) > 1 else ''} {numbers}" + (f" and {more} more" if more > 0 else "")


def _timing_notes(logged: Sequence[LoggedStep], times: Mapping[int, float | None]) -> list[str]:
    notes = []
    if any(times[step.step] is not None and not step.is_printed for step in logged):
        notes.append("step times are derived from printed rates, with the digits that those have")
    gap = interval_of(logged)
    if gap > 1:
        means = any(step.is_mean for step in logged)
        notes.append(f"the log has one line for {gap} steps" + ("; each time is the mean over them" if means else ""))
    if lost := [former.step + gap for former, later in pairwise(logged[1:]) if later.step > former.step + gap]:
        notes.append(f"lines are missing in the log: from {names_of(lost)} on")
    if untimed := sum(seconds is None for seconds in times.values()):
        notes.append(f"logged steps without a usable time, which are left out: {untimed}")
    return notes


def without_times(contents: LogContents, claims: Claims) -> str:
    """Say of steps without a time which rate the log prints, and which flags make it one."""
    rates = [rate for step in contents.steps.values() if (rate := finite_or_none(step.sequences_per_second))]
    names = ("global_batch_sequences", "sequence_tokens", "gpus")[: 1 if rates else 3]
    flags = ", ".join(FLAGS[name] for name in names if getattr(claims, name) is None)
    if not flags:
        return "none of the logged steps has a time, or a rate in tokens or samples of one GPU or of all (TFLOP/s give none)"
    rate = statistics.median(rates) if rates else 0.0
    tokens = f", {rate * claims.sequence_tokens:,.0f} tokens/s" if claims.sequence_tokens else ""
    prints = f" (the log prints {rate:,.4g} sequences/s{tokens})" if rate else ""
    return f"none of the logged steps has a time: {flags} gives one by a rate{prints}"


def interval_of(logged: Sequence[LoggedStep]) -> int:
    """Return how many steps a line stands for: the most frequent distance between lines.

    The first line of a process may stand for fewer: torchtitan prints step 1, then 10, 20, and so on.
    """
    settled = logged[1:] if len(logged) > 2 else logged
    return min(statistics.multimode([later.step - former.step for former, later in pairwise(settled)] or [1]))


# The second line of a process in Megatron-LM's logs.


def correct_second(contents: LogContents, claims: Claims) -> tuple[int, float | None, float | None, str] | None:
    """Undo the mean in Megatron-LM's second line of a process: return its step, time, derived loss and a note.

    Since core 0.16 the first line of a process resets neither timer nor losses (training_log, is_first_iteration), so the second
    line prints means over both: t2 = n x mean - t1 over n - 1 steps. Older versions reset. The third line shows which version
    ran; without a third line the second time is dropped. In a log that is cut, the first line is that of any iteration, and the
    second one stands.
    """
    logged = list(contents.steps.values())
    if len(logged) < 2 or not (logged[0].mean_since_reset and logged[1].mean_since_reset):
        return None
    first, second = logged[0], logged[1]
    first_seconds, mean = seconds_of(first, claims), seconds_of(second, claims)
    if first_seconds is None or mean is None:
        return None
    third = next((seconds for step in logged[2:] if (seconds := seconds_of(step, claims)) is not None), None)
    count = second.step - first.step + 1
    corrected = (count * mean - first_seconds) / (count - 1)
    shows_start = first_seconds > 1.25 * (mean if third is None else third)  # a process's first iteration takes more
    interval = logged[2].step - second.step if len(logged) > 2 else second.step - first.step
    # The number of the first line proves the first iteration of a process, or allows it, as after a restart from a checkpoint.
    proves = first.step == 1 or (len(logged) > 2 and interval > 1 and first.step % interval != 0)
    if corrected <= 0 or not (proves or (interval == 1 and shows_start)):
        return None
    if third is None:
        note = f"step {second.step} is left out: its time may be a mean with step {first.step}"
        return second.step, None, None, note
    if _log_distance(corrected, third) >= _log_distance(mean, third) or _log_distance(corrected, mean) < 0.01:  # noise does that
        return None
    loss = (count * second.loss - first.loss) / (count - 1) if second.loss and first.loss else None
    note = f"step {second.step}: the log prints the mean with step {first.step}; the step's own time and loss are derived"
    return second.step, corrected, loss, note


def _log_distance(left: float, right: float) -> float:
    return abs(math.log(left / right))
