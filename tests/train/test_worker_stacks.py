"""A rank that hangs shows where it stands, also without py-spy: the launcher sends SIGUSR1."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import takewhile

from planning import ROOT, make_plan

from tprimat.plan.schema import write_plan


def test_a_worker_that_waits_prints_its_stack_when_it_is_asked(tmp_path):
    """Its trainer waits for ever, as a rank does that others left alone."""
    (tmp_path / "waits.py").write_text("import time\n\ndef train(plan):\n    print('waiting', flush=True)\n    time.sleep(600)\n")
    plan = replace(make_plan(tmp_path / "run", "llama", {}), trainer="waits")
    write_plan(tmp_path / "plan.json", plan)
    command = [sys.executable, "-m", "tprimat.train.worker", "--plan", str(tmp_path / "plan.json")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as worker:
        try:
            assert "waiting\n" in iter(worker.stdout.readline, "")
            worker.send_signal(signal.SIGUSR1)
            printed = list(takewhile(lambda line: "in main" not in line, iter(worker.stderr.readline, "")))
        finally:
            worker.kill()
    *_, begins, trainer, worker_train = printed
    assert "(most recent call first)" in begins  # "Current thread", or "Thread" if a thread of torch got the signal
    assert "waits.py" in trainer
    assert "in train" in worker_train
