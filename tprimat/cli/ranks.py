"""Start this very command once more, on several ranks of this machine."""

import os
import sys
import time
from collections.abc import Callable, Sequence

from tprimat.engines.base import Command
from tprimat.launch.process import Child, Ending, Interrupts, Output, Supervision
from tprimat.launch.schema import Limits
from tprimat.logs.failures import Failure

MOST_SECONDS = 900.0


def run_ranks(module: str, arguments: Sequence[str], ranks: int, tell: Callable[[str], None]) -> str | None:
    """Torchrun with one process for each rank; its output is told line by line, and no process is left behind.

    Returns:
        why it did not end well, None where it did.

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
    """Our own modules wherever the user stands, and a fair share of the cores, which torchrun would cut to one."""
    cores = max(1, (os.cpu_count() or 1) // ranks)
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(cores)}


def supervise(command: Command, tell: Callable[[str], None], seconds: float = MOST_SECONDS) -> Ending:
    """Until its last process has ended; at most so many seconds."""
    limits = Limits(startup_timeout_seconds=seconds, hang_factor=1.0, hang_minimum_seconds=seconds)
    ends = time.monotonic() + seconds

    def tick(now: float) -> Failure | None:
        return Failure(outcome="timed_out", cause=f"No end within {seconds:.0f} s.") if now > ends else None

    with Interrupts() as interrupts:
        child = Child(command, limits.grace_seconds)
        return Supervision(child, Output((), tell, tell), limits, interrupts).run(tick, lambda _: None)
