"""The compiled AdamW against torch's own over several steps, clipping included."""

import pytest
import torch
from torch._dynamo.utils import counters

from tprimat.megatron.optimizer import CompiledAdamW, _compiled

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def parameters(generator):
    """Whole rows of the kernel, another number of them, and sizes that are none."""
    shapes = ((64, 32), (96,), (7, 5), (3,))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def groups(weights):
    return [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:], "weight_decay": 0.0}]


@pytest.fixture(scope="module", autouse=True)
def compiling():
    """Tests before this one may have redirected CUDA to the CPU, which turns torch.compile off for the process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
        patch.setattr(torch._dynamo.config, "disable", False)
        _compiled.cache_clear()
        yield
    _compiled.cache_clear()


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
        compiled.gradient_factor = torch.tensor([factor])
        compiled.step()
        plain.step()
    return compiled, ours, plain, theirs


def test_weights_and_moments_are_torchs(both):
    assert counters["stats"]["unique_graphs"] > 0
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


def test_it_goes_on_with_torchs_states_under_another_rate_and_decay(both):
    """As a schedule changes them: in the groups, between two steps."""
    compiled, ours, plain, theirs = both
    states = compiled.state_dict(), plain.state_dict()
    compiled.load_state_dict(states[1])
    plain.load_state_dict(states[0])
    compiled.gradient_factor = None
    for optimizer, weights in ((compiled, ours), (plain, theirs)):
        for group, decay in zip(optimizer.param_groups, (0.3, 0.0), strict=True):
            group["lr"], group["weight_decay"] = 1e-2, decay
        for weight in weights:
            weight.grad = torch.linspace(-1, 1, weight.numel()).view_as(weight)
        optimizer.step()
    assert {float(state["step"]) for state in compiled.state.values()} == {5.0}
    assert {float(state["step"]) for state in plain.state.values()} == {5.0}
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("late", [CompiledAdamW, torch.optim.AdamW])
def test_each_weight_counts_its_own_steps(late):
    early, weight = (torch.nn.Parameter(torch.ones(32)) for _ in range(2))
    optimizer = late([early, weight], **SETTINGS)
    for _ in range(3):
        early.grad = torch.ones(32)
        optimizer.step()
    early.grad, weight.grad = None, torch.ones(32)
    optimizer.step()
    assert torch.allclose(weight, torch.full((32,), 1 - 3e-3 * 1e-2 - 3e-3))


def test_an_infinite_norm_does_to_a_gradient_what_scaling_it_by_zero_would():
    weights = [torch.nn.Parameter(torch.ones(64)) for _ in range(2)]
    gradient = torch.cat([torch.ones(63), torch.tensor([torch.inf])])
    compiled, plain = CompiledAdamW(weights[:1], **SETTINGS), torch.optim.AdamW(weights[1:], **SETTINGS)
    compiled.gradient_factor = torch.zeros(1)
    weights[0].grad, weights[1].grad = gradient.clone(), gradient * 0.0
    compiled.step()
    plain.step()
    assert weights[0].isnan().sum() == 1
    assert torch.allclose(*weights, equal_nan=True)
