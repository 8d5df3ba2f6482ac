"""bf16 gradients and moments without master weights: what runs is that, it trains, and it is refused where it cannot."""

import pytest
from planning import make_plan, train_together

from tprimat.errors import ConfigError

LEAN = {
    "hardware.platforms.cpu.gpus_per_node": 1,
    "training.duration.max_steps": 8,
    "training.data.global_batch_size": 4,
    "training.data.sequence_length": 64,
    "training.optimizer.learning_rate": 5e-3,
    "platform_optimizations.cpu.precision": "bf16",
    "platform_optimizations.cpu.engine_options.optimizer_states": "bf16",
    "platform_optimizations.cpu.engine_options.accumulate_weight_gradients": True,
    "platform_optimizations.cpu.engine_options.streamed_cross_entropy": True,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lean")
    masters = {**LEAN, "platform_optimizations.cpu.engine_options.optimizer_states": "fp32"}
    return train_together([make_plan(folder / "lean", "qwen", LEAN), make_plan(folder / "masters", "qwen", masters)])


def test_the_record_says_what_the_states_were(trained):
    (lean, _), (masters, _) = trained
    assert lean.evidence.optimizer == "AdamW without master weights, states bfloat16"
    assert (lean.evidence.gradient_dtype, masters.evidence.gradient_dtype) == ("bfloat16", "float32")
    assert lean.engine_options["optimizer_states"] == "bf16"
    assert not lean.engine_options["distributed_optimizer"]
    assert lean.mismatches == ()


def test_the_first_step_is_that_of_fp32_states_and_the_loss_falls(trained):
    (_, lean), (_, masters) = trained
    assert lean[0].loss == masters[0].loss
    assert lean[0].grad_norm == pytest.approx(masters[0].grad_norm, rel=0.01)
    assert lean[-1].loss < lean[0].loss - 0.2
    assert lean[-1].loss != masters[-1].loss


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hardware.platforms.cpu.gpus_per_node": 2}, "It is for one rank alone; this layout has 2, which share fp32 states."),
        ({"platform_optimizations.cpu.precision": "fp32"}, "The weights are fp32, and their states with them."),
    ],
)
def test_it_is_refused_where_it_would_not_be_what_it_says(tmp_path, changes, why):
    with pytest.raises(ConfigError) as refused:
        make_plan(tmp_path, "qwen", {**LEAN, **changes})
    assert refused.value.why == why
    assert "optimizer_states" in str(refused.value.where)
