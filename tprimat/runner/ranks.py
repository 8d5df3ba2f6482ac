"""Run a command or a module on several ranks of this machine, with a time limit and no process left behind."""

import os
import sys
import time
from collections.abc import Callable, Sequence

from tprimat.engines.base import Command
from tprimat.launch.process import GRACE_SECONDS, Child, Ending, Interrupts, Output, Supervisor
from tprimat.logs.failures import Failure

MOST_SECONDS = 900.0


def run_ranks(module: str, arguments: Sequence[str], ranks: int, tell: Callable[[str], None]) -> str | None:
    """Start torchrun with one process per rank and pass its output on line by line.

    Returns:
        why it failed, or None if it succeeded.

    Raises:
        LaunchError: torchrun cannot be started.
    """
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    command = Command(argv=(*launcher, "-m", module, *arguments), environment=environment(ranks))
    ending = supervise(command, tell)
    if ending.stopped:
        return ending.stopped.cause
    return f"torchrun ended with status {ending.exit_code}." if ending.exit_code else None


def environment(ranks: int) -> dict[str, str]:
    """Return variables that make our modules importable in any folder and share the cores, which torchrun would cut to one."""
    cores = max(1, (os.cpu_count() or 1) // ranks)
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(cores)}


def supervise(command: Command, tell: Callable[[str], None], seconds: float = MOST_SECONDS) -> Ending:
    """Run a command until its last process has ended; stop it after this many seconds."""
    deadline = time.monotonic() + seconds

    def tick(now: float) -> Failure | None:
        return Failure(outcome="timed_out", cause=f"It did not end within {seconds:.0f} s.") if now > deadline else None

    with Interrupts() as interrupts:
        child = Child(command, GRACE_SECONDS)
        return Supervisor(child, Output((), tell, tell), GRACE_SECONDS, interrupts).run(tick, lambda _: None)
