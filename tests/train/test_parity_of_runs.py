"""Parity of real trainings on a CPU: bf16 reaches the losses of fp32, and training with another optimizer does not."""

import pytest
from planning import make_plan, train_together

from tprimat.runner.parity import compare_losses

COMMON = {
    "hardware.platforms.cpu.gpus_per_node": 1,
    "training.duration.max_steps": 24,
    "training.data.global_batch_size": 4,
    "training.data.sequence_length": 32,
    "training.data.dataset": "text:stdlib",
}
SIDES = {
    "fp32": {},
    "bf16": {"platform_optimizations.cpu.precision": "bf16"},
    "large-epsilon": {"training.optimizer.epsilon": 0.1},
    "another-seed": {"experiment.seed": 99},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    train_together([make_plan(folder / name, "llama", COMMON | change, layers=2) for name, change in SIDES.items()])
    return folder


def test_bf16_is_at_parity_with_fp32_and_a_changed_optimizer_is_refuted(trained):
    same = compare_losses(trained / "fp32", trained / "bf16", 0.02)
    assert (same.parity.outcome, same.parity.step, same.parity.seeds) == ("parity", 24, 1)
    other = compare_losses(trained / "fp32", trained / "large-epsilon", 0.02)
    assert other.parity.outcome == "refuted"


def test_another_seed_is_no_pair(trained):
    with pytest.raises(Exception, match="seed is .* and 99"):
        compare_losses(trained / "fp32", trained / "another-seed", 0.02)
