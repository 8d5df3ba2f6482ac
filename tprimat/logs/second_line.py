"""The second line of a process in Megatron-LM's logs, which may print means over the first two lines: what its own step took."""

import math

from tprimat.logs.claims import Claims
from tprimat.logs.contents import LogContents
from tprimat.logs.times import seconds_of

LEAST_CORRECTION = 0.01
"""Relative change of a second time that noise does not make."""
START_UP = 1.25
"""A process's first iteration takes more than so many times that of a later one."""


Correction = tuple[int, float | None, float | None, str]
"""The step of a second line, its time (None: uncertain, so the step is left out), its loss where it is derived, and a note."""


def correct_second(contents: LogContents, claims: Claims) -> Correction | None:
    """Undo the mean in Megatron-LM's second line of a process.

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
    shows_start = first_seconds > START_UP * (mean if third is None else third)
    interval = logged[2].step - second.step if len(logged) > 2 else second.step - first.step
    # The number of the first line proves the first iteration of a process, or allows it, as after a restart from a checkpoint.
    proves = first.step == 1 or (len(logged) > 2 and interval > 1 and first.step % interval != 0)
    if corrected <= 0 or not (proves or (interval == 1 and shows_start)):
        return None
    if third is None:
        note = f"step {second.step} is left out: its time may be a mean with step {first.step}"
        return second.step, None, None, note
    if log_distance(corrected, third) >= log_distance(mean, third) or log_distance(corrected, mean) < LEAST_CORRECTION:
        return None
    loss = (count * second.loss - first.loss) / (count - 1) if second.loss and first.loss else None
    note = f"step {second.step}: the log prints the mean with step {first.step}; the step's own time and loss are derived"
    return second.step, corrected, loss, note


def log_distance(left: float, right: float) -> float:
    """Return the absolute logarithm of the ratio of two times."""
    return abs(math.log(left / right))
