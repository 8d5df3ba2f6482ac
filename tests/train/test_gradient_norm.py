"""The norm and the clipping of all gradients together, against torch's own for one long vector."""

import pytest
import torch
import torch.distributed as dist

from tprimat.megatron import compat, optimizer


def gradients():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,), (2, 2, 2))]


def test_megatron_asks_for_the_norm_and_clips_through_these():
    from megatron.core.optimizer import clip_grads

    compat.replace_norm_and_scaling(optimizer.l2_norm, optimizer.scale)
    tensors = gradients()
    parameters = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.clone()
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    assert clip_grads.l2_norm_impl is optimizer.l2_norm
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, None, [[p.grad for p in parameters]], False)
    assert norm.shape == (1,)
    assert norm.item() == pytest.approx(whole.norm().item(), rel=1e-6)
    clip_grads.clip_grad_by_total_norm_fp32(parameters, 0.5, norm.item())
    clipped = torch.cat([parameter.grad.flatten() for parameter in parameters])
    assert torch.allclose(clipped, whole * (0.5 / norm.item()), rtol=1e-5)


@pytest.mark.parametrize("norm", [0.0, 0.25, 0.499, 2.0, 1e30, float("inf"), float("nan")])
def test_the_factor_is_the_one_that_megatron_scales_gradients_with(norm):
    from megatron.core.optimizer import clip_grads

    compat.replace_norm_and_scaling(optimizer.l2_norm, optimizer.scale)
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, 2.0, 3.0])
    factor = optimizer.clipping_factor(torch.tensor([norm]), 0.5)
    ours = parameter.grad * factor
    clip_grads.clip_grad_by_total_norm_fp32([parameter], 0.5, norm)
    assert factor.shape == (1,)
    assert torch.allclose(ours, parameter.grad, rtol=1e-6, atol=0)


def test_without_a_largest_norm_nothing_is_clipped():
    assert optimizer.clipping_factor(torch.tensor([1e9]), 0.0).tolist() == [1.0]


def test_the_norm_counts_the_gradients_of_every_optimizer_and_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        norm = optimizer.norm_over_ranks([(held, None) for held in (gradients(), [], gradients()[:1])])
    finally:
        dist.destroy_process_group()
    whole = torch.cat([tensor.flatten() for tensor in [*gradients(), gradients()[0]]])
    assert norm.shape == (1,)
    assert norm.item() == pytest.approx(whole.norm().item(), rel=1e-6)
