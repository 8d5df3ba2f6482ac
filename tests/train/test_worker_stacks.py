"""A rank that hangs shows where it stands, also without py-spy: the launcher sends SIGUSR1."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from planning import ROOT


def catches(pid, number):
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return mask >> (number - 1) & 1


def test_a_worker_that_waits_prints_its_stack_when_it_is_asked(tmp_path):
    plan = tmp_path / "plan.json"
    os.mkfifo(plan)  # reading it waits for ever, as a rank does that others left alone
    command = [sys.executable, "-m", "tprimat.train.worker", "--plan", str(plan)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as worker:
        try:
            deadline = time.monotonic() + 60
            while not catches(worker.pid, signal.SIGUSR1) and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.5)
            worker.send_signal(signal.SIGUSR1)
            printed = [worker.stderr.readline() for _ in range(8)]
        finally:
            worker.kill()
    assert any("in read_plan" in line for line in printed)
    assert any("worker.py" in line and "in main" in line for line in printed) or "most recent call first" in printed[0]
