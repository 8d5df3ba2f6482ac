"""Where the threads of a hung run stand, before it is stopped."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tprimat.launch import family

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
        family.send(catching, signal.SIGUSR1)
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
        return "python" in (family.PROC / str(pid) / "exe").readlink().name
    except OSError:
        return False


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for a signal (SigCgt in /proc/PID/status, proc(5))."""
    try:
        status = (family.PROC / str(pid) / "status").read_text(encoding="utf8", errors="replace")
    except OSError:
        return False
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)
