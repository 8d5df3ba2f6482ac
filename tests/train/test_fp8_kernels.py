"""8-bit products against 16-bit ones. A CPU multiplies the same numbers, only slowly."""

import pytest
import torch

from tprimat.megatron import fp8
from tprimat.megatron.evidence import layers_matmul_dtype
from tprimat.megatron.fp8 import Fp8Products
from tprimat.megatron.linear import NativeProducts


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
    for kernels in (NativeProducts(), Fp8Products()):
        out, kept = kernels.forward(rows, weight, bias)
        prepared = kernels.prepare(gradient)
        total = torch.full((48, 32), 1e-5)
        kernels.wgrad(total, prepared, kept, overwrite=overwrite)
        results.append((out, kernels.dgrad(prepared, weight), total - (0 if overwrite else 1e-5)))
    for plain, small in zip(*results, strict=True):
        assert 0.001 < relative_error(small, plain) < 0.08


def test_a_weight_is_converted_once_in_a_step_and_anew_in_the_next(operands):
    rows, weight, _ = operands
    kernels = Fp8Products()
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
    first, second = Fp8Products(), Fp8Products()
    assert layers_matmul_dtype([first, second], torch.bfloat16) is None
    first.forward(rows, weight, None)
    assert layers_matmul_dtype([first, second], torch.bfloat16) == "bf16"
    second.forward(rows, weight, None)
    assert layers_matmul_dtype([first, second], torch.bfloat16) == "fp8"
    assert layers_matmul_dtype([first, NativeProducts()], torch.bfloat16) == "bf16"
    assert layers_matmul_dtype([NativeProducts()], torch.bfloat16) == "bf16"
