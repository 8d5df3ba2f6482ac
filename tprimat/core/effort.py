"""How long one operation is probed: the rules of the timer, from which the page of probes describes its method."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long one operation is measured."""

    warmup: int = 30
    warmup_seconds: float | None = 0.3
    """Warm-up ends after this time, but not before one call; None: only after `warmup` calls."""
    repetitions: int = 200
    at_least: int = 6
    """The smallest number of samples whose extremes enclose the median with 95 % probability."""
    relative_interval: float | None = 0.01
    """Sampling ends when the median's 95 % interval is narrower than this fraction of it; None: only after `repetitions`."""
    seconds: float | None = 1.0
    """Sampling ends after this time, but not before `at_least` samples; None: only after `repetitions`."""
    flush: bool = True
    """Overwrite the cache before each repetition."""
    loaded_seconds: float | None = None
    """Keep the device busy with the call for this long before measuring, so that its clock is that of sustained work."""


MIN_SAMPLES_TO_SETTLE = 20
"""A handful of repetitions may agree before the device has adapted its clock to the load."""


def reduced(effort: Effort, small: bool) -> Effort:
    """Return the effort with fewer calls for small sizes, which only prove that everything runs.

    A rule that is off stays off. A processor's cache is not displaced: a server's may hold half a gigabyte, which takes longer to
    write than any call here.
    """
    if not small:
        return effort
    return replace(
        effort,
        warmup=3,
        repetitions=20,
        warmup_seconds=None if effort.warmup_seconds is None else 0.05,
        seconds=None if effort.seconds is None else 0.1,
        loaded_seconds=None if effort.loaded_seconds is None else 0.05,
        flush=False,
    )
