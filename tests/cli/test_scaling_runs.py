"""./benchmark.py --scaling: the fake trainer stands in for training, the rest is real."""

from pathlib import Path

import pytest

from tprimat.cli.main import start

ROOT = Path(__file__).parents[2]


def run(*arguments):
    asked = ["--config", str(ROOT / "config.yaml"), "--platform", "cpu", "--model", "llama", *arguments]
    return start("run", "benchmark.py", asked)


@pytest.mark.parametrize(("mode", "batches"), [("weak", [4, 8, 16]), ("strong", [16, 16, 16])])
def test_the_batch_grows_with_the_gpus_or_stays(trainer, capsys, mode, batches):
    assert run("--scaling", f"{mode}:2,1,4") == 0
    assert [plan.workload.layout.world_size for plan in trainer["started"]] == [1, 2, 4]
    assert [plan.workload.global_batch_sequences for plan in trainer["started"]] == batches
    assert [Path(plan.run_directory).parents[1].name for plan in trainer["started"]] == ["gpus-1", "gpus-2", "gpus-4"]
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
def test_what_cannot_be_scaled_starts_nothing(trainer, capsys, arguments, said):
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err
    assert not trainer["started"]
