"""The compiled AdamW against torch's own over several steps, clipping included."""

import pytest
import torch

from tprimat.train.megatron.compiled_adam import CompiledAdamW

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def parameters(generator):
    """Whole rows of the kernel, another number of them, and sizes that are none."""
    shapes = ((64, 32), (96,), (7, 5), (3,))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def groups(weights):
    return [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:], "weight_decay": 0.0}]


@pytest.fixture(scope="module")
def both():
    generator = torch.Generator().manual_seed(3)
    ours = parameters(generator)
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in ours]
    compiled, plain = CompiledAdamW(groups(ours), **SETTINGS), torch.optim.AdamW(groups(theirs), **SETTINGS)
    for factor in (1.0, 0.25, 0.5, 1.0):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad * factor
        compiled.gradient_factor = factor
        compiled.step()
        plain.step()
    return compiled, ours, plain, theirs


def test_weights_and_moments_are_torchs(both):
    compiled, ours, plain, theirs = both
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(compiled.state[one][name], plain.state[other][name], rtol=1e-5, atol=1e-7)


def test_gradients_are_left_as_they_came(both):
    _, ours, _, _ = both
    assert all(0.5 < weight.grad.std() < 2 for weight in ours)


def test_a_weight_without_gradient_stays():
    weight = torch.nn.Parameter(torch.ones(32))
    CompiledAdamW([weight], **SETTINGS).step()
    assert torch.equal(weight, torch.ones(32))
