"""What SLURM says of the job that this process belongs to. Reads SLURM_JOB_ID, SLURM_ARRAY_* and SLURM_JOB_END_TIME."""

import os
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime

QUERY_SECONDS = 3.0
"""For an answer while a job ends; SLURM kills it 30 s after its first signal."""


def job_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the scheduler's name of this job, such as slurm 4711, or slurm 4711_3 for a task of an array; None outside one."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"slurm {environment['SLURM_ARRAY_JOB_ID']}_{environment.get('SLURM_ARRAY_TASK_ID', '')}"
    return f"slurm {environment['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in environment else None


class TimeLimit:
    """The time limit of this job. A job that is cancelled ends now, so what counts is the limit that it had before."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Ask SLURM; the variable is what SLURM 23.02 and later said at the start of the job."""
        job, end = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_END_TIME", "")
        self._job = job if job.isdigit() else None
        self._end = float(end) if end.isdigit() else None
        self._refresh()

    def seconds_left(self) -> float | None:
        """Return the seconds until the limit, which may have changed; negative after it. None: no job, or no limit."""
        self._refresh()
        return None if self._end is None else self._end - time.time()

    def _refresh(self) -> None:
        if self._job is None:
            return
        command = ["squeue", "--noheader", "--states=all", f"--jobs={self._job}", "--format=%T %e"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
            state, end = done.stdout.split()
            if state == "RUNNING":
                self._end = datetime.fromisoformat(end).timestamp()  # in local time, without a zone
        except (OSError, subprocess.SubprocessError, ValueError):  # no squeue here, or no limit
            return
