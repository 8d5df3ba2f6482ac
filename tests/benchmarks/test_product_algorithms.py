"""benchmarks/product_algorithms.py, as far as a CPU goes: what cuBLASLt is asked is what torch's call computes."""

import json

import pytest
import torch

from benchmarks.product_algorithms import begun, bf16_products, candidates, fp8_products, line, operands_of


@pytest.mark.parametrize("candidate", bf16_products("qkv", 24, 40, 56)[:2], ids=lambda candidate: candidate.name)
def test_both_programs_compute_the_same_product(candidate):
    torch.manual_seed(0)
    product = candidate.product
    a, b = operands_of(product, torch.device("cpu"))
    left = (a.t() if product.a_transposed else a).double()
    right = (b.t() if product.b_transposed else b).double()
    total = torch.empty(product.m, product.n, dtype=product.total)
    candidate.torch_call(total, a, b)
    assert torch.allclose(total.double(), left @ right, rtol=0.01, atol=0.05)


def test_every_product_of_a_layer_is_there_once_with_the_work_of_a_forward_pass():
    for fp8, matrices in ((False, 5), (True, 4)):
        found = candidates("llama-3.1-8b", 8192, fp8=fp8)
        assert len({candidate.name for candidate in found}) == len(found) == 3 * matrices
        for three in zip(*[iter(found)] * 3, strict=True):
            assert len({one.product.m * one.product.n * one.product.k for one in three}) == 1
            assert [one.adds for one in three] == [False, False, True]


def test_8_bit_operands_have_the_summed_dimension_contiguous():
    for candidate in fp8_products("qkv", 32, 48, 64):
        product = candidate.product
        a, b = operands_of(product, torch.device("cpu"))
        assert (a.shape, b.shape) == ((product.m, product.k), (product.n, product.k))
        assert (a.dtype, b.dtype) == (product.a, product.b)


def test_the_best_is_the_one_with_the_shortest_median():
    timings = {"torch": [3.0, 1.0, 1.1], "0": [1.2, 1.3, 9.0], "4": [0.9, 1.0, 2.0]}
    found = {"algorithms": {name: {"seconds": [one * 1e-3 for one in seconds]} for name, seconds in timings.items()}}
    assert line("qkv fprop", found) == ["qkv fprop", "1.100 ms", "1.300 ms", "1.000 ms", "1.100", "1.300", "4"]


def test_an_expert_multiplies_its_share_of_the_rows():
    rows = {candidate.name: candidate.product.m for candidate in candidates("mixtral-8x7b", 8192, fp8=False)}
    assert rows["qkv fprop"] == 8192
    assert rows["expert_up fprop"] == rows["expert_down fprop"] == 8192 * 2 // 8


def test_torch_adds_an_8_bit_weight_gradient_as_training_must(monkeypatch):
    def scaled_mm(a, b, *_, out_dtype, **__):
        return (a.float() @ b.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    candidate = fp8_products("qkv", 32, 48, 64)[2]
    a, b = operands_of(candidate.product, torch.device("cpu"))
    total = torch.ones(candidate.product.m, candidate.product.n)
    candidate.torch_call(total, a, b)
    assert torch.allclose(total, 1 + a.float() @ b.float().t(), rtol=0.01, atol=0.05)


def test_figures_of_another_gpu_are_not_continued(tmp_path):
    here = {"accelerator": "NVIDIA H200", "torch": "2.9"}
    file = tmp_path / "products.json"
    assert begun(file, here) == {**here, "products": {}}
    file.write_text(json.dumps({**here, "products": {"qkv": {}}}))
    assert begun(file, here)["products"] == {"qkv": {}}
    for other in ({**here, "accelerator": "NVIDIA H100", "products": {}}, {**here, "torch": "2.8", "products": {}}, [], {}, here):
        file.write_text(json.dumps(other))
        with pytest.raises(SystemExit, match="choose another --output"):
            begun(file, here)
