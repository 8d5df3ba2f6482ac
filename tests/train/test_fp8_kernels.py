"""8-bit products against 16-bit ones. A CPU multiplies the same numbers, only slowly."""

from types import SimpleNamespace

import pytest
import torch

from tprimat.megatron import fp8
from tprimat.megatron.fp8 import Fp8Products
from tprimat.megatron.layers import SumRMSNorm, SumRMSNormMaxima
from tprimat.megatron.linear import LinearProducts, row_maxima
from tprimat.megatron.training import layers_matmul_dtype

HAS_FP8_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


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
    for kernels in (LinearProducts(), Fp8Products()):
        out, kept = kernels.forward(rows, weight, bias)
        prepared = kernels.operand(gradient, gradient=True)
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
    fp8.free_weights()
    weight.mul_(-1)
    anew, _ = kernels.forward(rows, weight, None)
    assert torch.equal(anew, first)


def test_a_run_says_fp8_once_every_layer_has_multiplied_in_it_and_nothing_before(operands):
    rows, weight, _ = operands
    first, second = Fp8Products(), Fp8Products()
    assert layers_matmul_dtype([first, second], torch.bfloat16) is None
    first.forward(rows, weight, None)
    assert layers_matmul_dtype([first, second], torch.bfloat16) == "bf16"
    second.forward(rows, weight, None)
    assert layers_matmul_dtype([first, second], torch.bfloat16) == "fp8"
    assert layers_matmul_dtype([first, LinearProducts()], torch.bfloat16) == "bf16"
    assert layers_matmul_dtype([LinearProducts()], torch.bfloat16) == "bf16"


@pytest.mark.parametrize("residual", [False, True])
def test_the_norm_for_8_bits_leaves_the_maxima_and_changes_no_number(residual):
    config = SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=False)
    plain, small = SumRMSNorm(config, 32), SumRMSNormMaxima(config, 32)
    results = []
    for norm in (plain, small):
        generator = torch.Generator().manual_seed(5)
        tensors = [torch.randn(8, 2, 32, generator=generator).bfloat16().requires_grad_() for _ in range(1 + residual)]
        stream, normed = norm(*tensors)
        (stream.sum() + (normed * normed).sum()).backward()
        results.append((stream, normed, norm.weight.grad, *(tensor.grad for tensor in tensors)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert row_maxima(results[0][1]) is None
    assert torch.equal(row_maxima(results[1][1]), results[1][1].abs().amax(dim=-1))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_FP8_GPU, reason="needs a GPU with 8-bit products"))]


@pytest.mark.skipif(not HAS_FP8_GPU, reason="needs a GPU that multiplies 8-bit numbers")
@pytest.mark.parametrize("shape", [(64, 128), (192, 96), (4096, 1008)])
@pytest.mark.parametrize("dtype", [fp8.FORWARD_DTYPE, fp8.GRADIENT_DTYPE])
def test_the_kernels_for_gpus_convert_to_the_same_bits(shape, dtype):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    expected = fp8._scaled(x, fp8._largest(x), dtype)
    for got, wanted in zip(fp8.convert(x, dtype), expected, strict=True):
        assert torch.equal(got.float(), wanted.float())
