"""./benchmark.py --scaling: the fake trainer stands in for training, the rest is real."""

import sys
from pathlib import Path

import pytest

from tprimat.cli.main import start
from tprimat.core.errors import ConfigError
from tprimat.engines.base import Command
from tprimat.runner import run as training
from tprimat.runner.grid import batch_share

ROOT = Path(__file__).parents[2]
TRAINER = (sys.executable, "-S", str(ROOT / "tests" / "fake_trainer.py"))


@pytest.fixture
def plans(tmp_path, monkeypatch):
    """Starts the fake trainer instead of torchrun, and keeps the plans that were started."""
    started = []

    def command_on(plan, place):
        started.append(plan)
        environment = {"FAKE_STEPS": f"{plan.run_directory}/steps.jsonl", "FAKE_TOKENS": str(plan.workload.tokens_per_step)}
        return Command(argv=(*TRAINER, "pace", "0.002", "steps", str(plan.steps)), environment=environment)

    monkeypatch.setattr(training, "command_on", command_on)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTPUT_DIR", raising=False)
    return started


def run(*arguments):
    asked = ["--config", str(ROOT / "config.yaml"), "--platform", "cpu", "--model", "llama", *arguments]
    return start("run", "benchmark.py", asked)


@pytest.mark.parametrize(("mode", "batches"), [("weak", [4, 8, 16]), ("strong", [16, 16, 16])])
def test_the_batch_grows_with_the_gpus_or_stays(plans, capsys, mode, batches):
    assert run("--scaling", f"{mode}:2,1,4") == 0
    assert [plan.workload.layout.world_size for plan in plans] == [1, 2, 4]
    assert [plan.workload.global_batch_sequences for plan in plans] == batches
    assert [Path(plan.run_directory).parents[1].name for plan in plans] == ["gpus-1", "gpus-2", "gpus-4"]
    assert all(Path("output", name).is_file() for name in ("img_throughput.png", "img_multiplier.png"))
    shown = capsys.readouterr().out
    assert mode in shown.lower()
    assert "Not compared with the workload above" not in shown  # the series is what compares them
    assert "--even-if-different" not in shown  # which is no flag of ./benchmark.py


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scaling", "4"], "two or more numbers"),
        (["--scaling", "0,2"], "two or more numbers"),
        (["--scaling", "1,two"], "two or more numbers"),
        (["--scaling", "1,2", "--gpus", "2"], "exclude each other"),
        (["--scaling", "1,2,4", "--global-batch-size", "6"], "not divisible"),
        (["--scaling", "strong:2,3"], "not divisible"),
        (["--scaling", "1,2", "--parallel", "balanced"], "world size (1) is not divisible by 2"),
    ],
)
def test_what_cannot_be_scaled_starts_nothing(plans, capsys, arguments, said):
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err
    assert not plans


def test_a_share_that_is_no_whole_number_of_sequences_is_refused():
    assert batch_share(128, 2, 8, "nvidia") == 32
    with pytest.raises(ConfigError, match="on 8 GPUs leaves no whole number for 1"):
        batch_share(12, 1, 8, "nvidia")
    with pytest.raises(ConfigError, match="on 8 processes leaves no whole number for 1"):
        batch_share(12, 1, 8, "cpu")
