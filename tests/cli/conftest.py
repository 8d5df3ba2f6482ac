"""The fake trainer in place of torchrun."""

import sys

import pytest
from commands import ROOT

from tprimat.engines.base import Command
from tprimat.runner import run as training

TRAINER = (sys.executable, "-S", str(ROOT / "tests" / "fake_trainer.py"))


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Starts the fake trainer; the dict says what it does after its steps, by strategy, for all runs or run by run.

    Its "started" lists the plans.
    """
    last = {"started": []}

    def command_on(plan, place):
        del place
        last["started"].append(plan)
        environment = {"FAKE_STEPS": f"{plan.run_directory}/steps.jsonl", "FAKE_TOKENS": str(plan.workload.tokens_per_step)}
        words = last.get(plan.strategy, ())
        words = words.pop(0) if isinstance(words, list) else words
        return Command(argv=(*TRAINER, "pace", "0.002", "steps", str(plan.steps), *words), environment=environment)

    monkeypatch.setattr(training, "command_on", command_on)
    monkeypatch.setattr(sys, "argv", ["run_all", "llama"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTPUT_DIR", raising=False)
    return last
