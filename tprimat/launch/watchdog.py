"""Whether a run still lives: it must start, go on, and end within its limits."""

import statistics

from tprimat.launch.schema import Failure, Limits

OWN_SLEEP_SECONDS = 3.0
"""Who has not looked for so long was stopped himself (Ctrl-Z, a suspended machine) and has no right to call others hung."""


class Watchdog:
    """Times are seconds on the launcher's monotonic clock."""

    def __init__(self, limits: Limits, started: float, planned_steps: int | None = None) -> None:
        self.limits = limits
        self.started = started
        self.planned_steps = planned_steps
        self._last_step: int | None = None
        self._last_at = started
        self._looked_at = started
        self._step_seconds: list[float] = []
        self._gaps: list[float] = []

    def saw_step(self, step: int, step_seconds: float, now: float) -> None:
        """A step has ended."""
        if self._last_step is not None:
            self._gaps.append(now - self._last_at)
        self._last_step, self._last_at = step, now
        self._step_seconds.append(step_seconds)

    @property
    def patience_seconds(self) -> float:
        """How long no step may end.

        The larger one of what the steps say of themselves and of the gaps between their reports: a framework that reports every
        tenth step is not hung at the ninth.
        """
        usual = max(statistics.median(self._step_seconds), statistics.median(self._gaps or [0.0]))
        return max(self.limits.hang_factor * usual, self.limits.hang_minimum_seconds)

    def verdict(self, now: float) -> Failure | None:
        """Why the run must be stopped, if it must. Asked many times a second."""
        limits = self.limits
        if now - self._looked_at > OWN_SLEEP_SECONDS:
            self._last_at = min(now, self._last_at + now - self._looked_at)
        self._looked_at = now
        if limits.run_timeout_seconds is not None and now - self.started > limits.run_timeout_seconds:
            return Failure(
                outcome="timed_out",
                cause=f"The run took longer than {self._allowed()} ({limits.run_timeout_seconds:g} s); {self._progress()}.",
                hint=f"raise {limits.run_timeout_flag or 'benchmarking.run_timeout_seconds'}, or ask for fewer steps",
            )
        if self._last_step is None:
            if now - self._last_at <= limits.startup_timeout_seconds:
                return None
            return Failure(
                outcome="timed_out",
                cause=f"No step ended within startup_timeout_seconds ({limits.startup_timeout_seconds:g} s) of the start.",
                hint="the log says how far it came; raise benchmarking.startup_timeout_seconds if it only compiles or downloads",
            )
        if now - self._last_at <= self.patience_seconds:
            return None
        median = statistics.median(self._step_seconds)
        return Failure(
            outcome="hung",
            cause=f"No step for {now - self._last_at:.0f} s while a step takes {median:.3g} s; {self._progress()}.",
            hint="stacks.txt in the run's folder shows where each rank waits, if py-spy is installed or the worker dumps them",
        )

    def _allowed(self) -> str:
        flag = self.limits.run_timeout_flag
        return f"{flag} allowed" if flag else "run_timeout_seconds"

    def _progress(self) -> str:
        if self._last_step is None:
            return "no step ended"
        if self._last_step == self.planned_steps:
            return f"all {self._last_step} steps ended, the processes did not"
        return f"the last was step {self._last_step}" + (f" of {self.planned_steps}" if self.planned_steps else "")
