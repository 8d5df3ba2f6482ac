"""Run one command, or one module on several ranks of this machine, to its end; and ask a scheduler."""

import os
import sys
import time
from collections.abc import Callable, Sequence

from tprimat.engines.base import Command
from tprimat.hardware.nodes import Nodes
from tprimat.launch.process import GRACE_SECONDS, Child, Ending, Interrupts, Output, Supervisor
from tprimat.launch.torchrun import torchrun
from tprimat.records.schema import Failure

DEFAULT_LIMIT_SECONDS = 900.0


def run_command(command: Command, on_line: Callable[[str], None], limit_seconds: float = DEFAULT_LIMIT_SECONDS) -> Ending:
    """Run a command until its last process has ended or the time limit has passed, and pass on its output line by line."""
    ends = time.monotonic() + limit_seconds

    def tick(now: float) -> Failure | None:
        return Failure(outcome="timed_out", cause=f"No end within {limit_seconds:.0f} s.") if now > ends else None

    with Interrupts() as interrupts:
        return Supervisor(Child(command, GRACE_SECONDS), Output((), on_line, on_line), interrupts).run(tick)


def run_ranks(module: str, arguments: Sequence[str], ranks: int, on_line: Callable[[str], None]) -> str | None:
    """Run a module under torchrun with one process per rank, and leave no process behind.

    Returns:
        Why the ranks failed; None where all ended well.

    Raises:
        LaunchError: torchrun cannot be started.
        SystemExit: a signal asked for an end.
    """
    argv = (*torchrun(Nodes(), ranks), "-m", module, *arguments)
    ending = run_command(Command(argv=argv, environment=python_environment(ranks)), on_line)
    if ending.stop_signal:
        raise SystemExit(128 + ending.stop_signal)
    if ending.stopped:
        return ending.stopped.cause
    return f"torchrun ended with status {ending.exit_code}." if ending.exit_code else None


def python_environment(ranks: int = 1) -> dict[str, str]:
    """Return the variables with which a child finds this Python's modules and each rank gets a fair share of the cores."""
    cores = max(1, (os.cpu_count() or 1) // ranks)  # torchrun alone would give each rank one
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(cores)}
