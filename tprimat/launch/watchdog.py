"""Time limits of a run: decide when it must be stopped."""

import statistics
from collections import deque
from dataclasses import dataclass

from tprimat.records.schema import Failure

USUAL_STEPS = 1000
"""The newest steps, whose median time is the usual one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a run may take to start, to make a step, and in total."""

    startup_timeout_seconds: float
    """Until the first step has ended."""
    hang_factor: float
    hang_minimum_seconds: float
    run_timeout_seconds: float | None = None


class Watchdog:
    """Decide whether a run is still alive. All times are seconds on the launcher's monotonic clock."""

    def __init__(self, limits: Limits, started: float, planned_steps: int | None = None) -> None:
        self.limits = limits
        self.started = started
        self.planned_steps = planned_steps
        self._last_step: int | None = None
        self._last_progress = started
        self._step_seconds: deque[float] = deque(maxlen=USUAL_STEPS)
        self._gaps: deque[float] = deque(maxlen=USUAL_STEPS)

    def saw_step(self, step: int, step_seconds: float, now: float) -> None:
        """Record that a step has ended."""
        if self._last_step is not None:
            self._gaps.append(now - self._last_progress)
        self._last_step, self._last_progress = step, now
        self._step_seconds.append(step_seconds)

    @property
    def hang_seconds(self) -> float:
        """Longest time without a finished step.

        Based on the reported step times or the gaps between the reports, whichever is longer: a framework that reports every
        tenth step is not hung at the ninth.
        """
        usual = max(statistics.median(self._step_seconds), statistics.median(self._gaps or [0.0]))
        return max(self.limits.hang_factor * usual, self.limits.hang_minimum_seconds)

    def verdict(self, now: float) -> Failure | None:
        """Return why the run must be stopped, or None. Called several times a second."""
        limits = self.limits
        if limits.run_timeout_seconds is not None and now - self.started > limits.run_timeout_seconds:
            return Failure(
                outcome="timed_out",
                cause=f"The run took longer than run_timeout_seconds ({limits.run_timeout_seconds:g} s); {self._progress()}.",
                hint="raise benchmarking.run_timeout_seconds, or ask for fewer steps",
            )
        if self._last_step is None:
            if now - self._last_progress <= limits.startup_timeout_seconds:
                return None
            return Failure(
                outcome="timed_out",
                cause=f"No step finished within startup_timeout_seconds ({limits.startup_timeout_seconds:g} s) of the start.",
                hint="the log shows how far it got; raise benchmarking.startup_timeout_seconds if it only compiles or downloads",
            )
        if now - self._last_progress <= self.hang_seconds:
            return None
        median = statistics.median(self._step_seconds)
        return Failure(
            outcome="hung",
            cause=f"No step for {now - self._last_progress:.0f} s, while a step takes {median:.3g} s; {self._progress()}.",
        )

    def _progress(self) -> str:
        if self._last_step is None:
            return "no step finished"
        if self._last_step == self.planned_steps:
            return f"all {self._last_step} steps finished, but the processes did not end"
        return f"the last was step {self._last_step}" + (f" of {self.planned_steps}" if self.planned_steps else "")
