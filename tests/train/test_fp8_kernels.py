"""8-bit products against 16-bit ones: each alone, and a training with them. A CPU multiplies the same numbers, only slowly."""

from dataclasses import replace

import pytest
import torch
from planning import make_plan, train_together

from tprimat.megatron import fp8, wgrad
from tprimat.train import cpu_redirect

wgrad.install()
cpu_redirect.install()

from tprimat.megatron.evidence import multiplied_dtype  # noqa: E402
from tprimat.megatron.fp8 import Fp8Kernels  # noqa: E402
from tprimat.megatron.linear import PlainKernels  # noqa: E402


def relative_error(got, wanted):
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.fixture
def operands():
    generator = torch.Generator().manual_seed(3)
    rows, weight, gradient = (torch.randn(shape, generator=generator).bfloat16() for shape in ((64, 32), (48, 32), (64, 48)))
    return rows * 7, weight * 0.02, gradient * 1e-6


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_three_products_are_bf16s_to_the_rounding_of_8_bits(operands, with_bias, overwrite):
    rows, weight, gradient = operands
    bias = torch.randn(48).bfloat16() if with_bias else None
    results = []
    for kernels in (PlainKernels(), Fp8Kernels()):
        out, kept = kernels.forward(rows, weight, bias)
        prepared = kernels.prepare(gradient)
        total = torch.full((48, 32), 1e-5)
        kernels.add_weight_gradient(total, prepared, kept, overwrite=overwrite)
        results.append((out, kernels.input_gradient(prepared, weight), total - (0 if overwrite else 1e-5)))
    for plain, small in zip(*results, strict=True):
        assert 0.001 < relative_error(small, plain) < 0.08


def test_a_weight_is_converted_once_in_a_step_and_anew_in_the_next(operands):
    rows, weight, _ = operands
    kernels = Fp8Kernels()
    fp8.next_step()
    first, _ = kernels.forward(rows, weight, None)
    weight.mul_(-1)
    again, _ = kernels.forward(rows, weight, None)
    assert torch.equal(first, again)
    fp8.next_step()
    changed, _ = kernels.forward(rows, weight, None)
    assert torch.equal(changed, -first)


def test_a_run_says_fp8_once_every_layer_has_multiplied_in_it_and_nothing_before(operands):
    rows, weight, _ = operands
    first, second = Fp8Kernels(), Fp8Kernels()
    assert multiplied_dtype([first, second], torch.bfloat16) is None
    first.forward(rows, weight, None)
    assert multiplied_dtype([first, second], torch.bfloat16) == "bf16"
    second.forward(rows, weight, None)
    assert multiplied_dtype([first, second], torch.bfloat16) == "fp8"
    assert multiplied_dtype([first, PlainKernels()], torch.bfloat16) == "bf16"
    assert multiplied_dtype([PlainKernels()], torch.bfloat16) == "bf16"


def test_training_follows_bf16_but_is_not_it_and_says_what_ran(tmp_path):
    settings = {
        "training.duration.max_steps": 6,
        "hardware.platforms.cpu.gpus_per_node": 1,
        "training.data.global_batch_size": 4,
        "training.data.sequence_length": 64,
        "training.optimizer.learning_rate": 1e-3,
        "platform_optimizations.cpu.engine_options.accumulate_weight_gradients": True,
    }
    plans = [make_plan(tmp_path / name, "llama", {**settings, "platform_optimizations.cpu.precision": "bf16"}) for name in "ab"]
    plans[1] = replace(plans[1], precision="fp8")
    (_, plain), (run, small) = train_together(plans)
    assert (run.matmul_dtype, run.evidence.parameter_dtype, run.mismatches) == ("fp8", "bfloat16", ())
    assert small[-1].loss < small[0].loss - 0.3
    assert [step.loss for step in small] == pytest.approx([step.loss for step in plain], rel=0.02)
    assert [step.loss for step in small] != pytest.approx([step.loss for step in plain], rel=1e-6)
