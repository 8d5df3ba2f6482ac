"""Where the threads of a hung run stand, before it is stopped."""

import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tprimat.launch import process_tree
from tprimat.launch.schema import Limits
from tprimat.logs.failures import Failure

SECONDS_EACH = 10.0
SECONDS_IN_ALL = 30.0


def dump_stacks(pids: set[int], path: Path, on_notice: Callable[[str], None]) -> None:
    """Write the Python stacks of a run's processes to a file with py-spy.

    Without py-spy the processes that catch SIGUSR1 get it: our workers, which called faulthandler.register(SIGUSR1), print
    their stacks into the log. Whoever does not catch the signal would die of it and does not get it.
    """
    tool = py_spy()
    if tool is None:
        catching = {pid for pid in pids if catches(pid, signal.SIGUSR1)}
        process_tree.send(catching, signal.SIGUSR1)
        if catching:
            time.sleep(1.0)  # they print while we wait; the pipe holds 64 KiB of it
        else:
            on_notice("py-spy is not installed: no stacks are saved.")
        return
    began = time.monotonic()
    texts = [stack(tool, pid) for pid in sorted(pids) if is_python(pid) and time.monotonic() - began < SECONDS_IN_ALL]
    try:
        path.write_text("\n".join(texts), encoding="utf8")
    except OSError as error:
        on_notice(f"the stacks cannot be written to {path}: {error.strerror or error}.")
    else:
        on_notice(f"the stacks of {len(texts)} processes are in {path}.")


def py_spy() -> str | None:
    """On PATH, or beside this Python: an environment that was not activated has it there."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def stack(tool: str, pid: int) -> str:
    """What py-spy says of one process, errors included."""
    try:
        done = subprocess.run(
            [tool, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=SECONDS_EACH, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"Process {pid}: py-spy did not answer within {SECONDS_EACH:g} s\n"
    except OSError as error:
        return f"Process {pid}: py-spy cannot be started: {error}\n"
    return done.stdout + done.stderr


def is_python(pid: int) -> bool:
    """Whether the process runs a Python interpreter."""
    try:
        return "python" in (process_tree.PROC / str(pid) / "exe").readlink().name
    except OSError:
        return False


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for a signal (SigCgt in /proc/PID/status, proc(5))."""
    try:
        status = (process_tree.PROC / str(pid) / "status").read_text(encoding="utf8", errors="replace")
    except OSError:
        return False
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


# Whether a run still lives: it must start, go on, and end within its limits.

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
