"""Time limits of a run: decide when it must be stopped, and save the stacks of its processes before it is."""

import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tprimat.launch import process_tree
from tprimat.logs.failures import Failure

SUSPENDED_SECONDS = 3.0
"""A launcher that has not polled for this long was suspended (Ctrl-Z, a sleeping machine): the pause is no hang of the run."""
PY_SPY_SECONDS_EACH = 10.0
PY_SPY_SECONDS_TOTAL = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a run may take to start, to make a step, and in total."""

    startup_timeout_seconds: float
    """Until the first step has ended."""
    hang_factor: float
    hang_minimum_seconds: float
    run_timeout_seconds: float | None = None
    run_timeout_flag: str | None = None
    """The flag that set run_timeout_seconds, for messages; None means the key in the configuration."""


class Watchdog:
    """Decide whether a run is still alive. All times are seconds on the launcher's monotonic clock."""

    def __init__(self, limits: Limits, started: float, planned_steps: int | None = None) -> None:
        self.limits = limits
        self.started = started
        self.planned_steps = planned_steps
        self._last_step: int | None = None
        self._last_progress = started
        self._last_check = started
        self._step_seconds: list[float] = []
        self._gaps: list[float] = []

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
        if now - self._last_check > SUSPENDED_SECONDS:
            self._last_progress = min(now, self._last_progress + now - self._last_check)
        self._last_check = now
        if limits.run_timeout_seconds is not None and now - self.started > limits.run_timeout_seconds:
            return Failure(
                outcome="timed_out",
                cause=f"The run took longer than {self._limit_name()} ({limits.run_timeout_seconds:g} s); {self._progress()}.",
                hint=f"raise {limits.run_timeout_flag or 'benchmarking.run_timeout_seconds'}, or ask for fewer steps",
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
            hint="stacks.txt in the run's folder shows where each rank waits, if py-spy is installed or the worker dumps them",
        )

    def _limit_name(self) -> str:
        flag = self.limits.run_timeout_flag
        return f"{flag} allows" if flag else "run_timeout_seconds"

    def _progress(self) -> str:
        if self._last_step is None:
            return "no step finished"
        if self._last_step == self.planned_steps:
            return f"all {self._last_step} steps finished, but the processes did not end"
        return f"the last was step {self._last_step}" + (f" of {self.planned_steps}" if self.planned_steps else "")


def dump_stacks(pids: set[int], path: Path, on_notice: Callable[[str], None]) -> None:
    """Write the Python stacks of a run's processes to a file with py-spy.

    Without py-spy, send SIGUSR1 to the processes that handle it: our workers call faulthandler.register(SIGUSR1) and print their
    stacks to the log. A process without a handler would die of the signal, so it does not get one.
    """
    py_spy = find_py_spy()
    if py_spy is None:
        handling = {pid for pid in pids if handles_signal(pid, signal.SIGUSR1)}
        process_tree.send(handling, signal.SIGUSR1)
        if handling:
            time.sleep(1.0)  # they print meanwhile; the pipe holds 64 KiB of it
        else:
            on_notice("py-spy is not installed: no stacks are saved.")
        return
    began = time.monotonic()
    texts = [stack(py_spy, pid) for pid in sorted(pids) if is_python(pid) and time.monotonic() - began < PY_SPY_SECONDS_TOTAL]
    try:
        path.write_text("\n".join(texts), encoding="utf8")
    except OSError as error:
        on_notice(f"The stacks cannot be written to {path}: {error.strerror or error}.")
    else:
        on_notice(f"The stacks of {len(texts)} processes are in {path}.")


def find_py_spy() -> str | None:
    """Find py-spy on PATH, or next to this Python in an environment that is not activated."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def stack(py_spy: str, pid: int) -> str:
    """Return what py-spy prints about one process, errors included."""
    try:
        done = subprocess.run(
            [py_spy, "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=PY_SPY_SECONDS_EACH,
            check=False,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"Process {pid}: py-spy did not answer within {PY_SPY_SECONDS_EACH:g} s\n"
    except OSError as error:
        return f"Process {pid}: py-spy cannot be started: {error}\n"
    return done.stdout + done.stderr


def is_python(pid: int) -> bool:
    """Return whether the process runs a Python interpreter."""
    try:
        return "python" in (process_tree.PROC / str(pid) / "exe").readlink().name
    except OSError:
        return False


def handles_signal(pid: int, number: int) -> bool:
    """Return whether the process has a handler for a signal (SigCgt in /proc/PID/status, proc(5))."""
    try:
        status = (process_tree.PROC / str(pid) / "status").read_text(encoding="utf8", errors="replace")
    except OSError:
        return False
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)
