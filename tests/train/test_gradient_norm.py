"""The norm and the clipping of all gradients together, against torch's own for one long vector."""

import pytest
import torch

from tprimat.train import redirect
from tprimat.train.megatron import gradient_norm, weight_gradients

weight_gradients.install()
redirect.install()


def gradients():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,), (2, 2, 2))]


def test_megatron_asks_for_the_norm_and_clips_through_these():
    from megatron.core.optimizer import clip_grads

    gradient_norm.install()
    tensors = gradients()
    parameters = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.clone()
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    assert clip_grads.l2_norm_impl is gradient_norm.l2_norm
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, None, [[p.grad for p in parameters]], False)
    assert norm.shape == (1,)
    assert norm.item() == pytest.approx(whole.norm().item(), rel=1e-6)
    clip_grads.clip_grad_by_total_norm_fp32(parameters, 0.5, norm.item())
    clipped = torch.cat([parameter.grad.flatten() for parameter in parameters])
    assert torch.allclose(clipped, whole * (0.5 / norm.item()), rtol=1e-5)


@pytest.mark.parametrize(("norm", "factors"), [(0.25, []), (0.499, []), (2.0, [0.25]), (float("inf"), [0.0]), (float("nan"), [])])
def test_a_factor_is_told_while_somebody_asks_for_it_and_gradients_are_scaled_again_afterwards(norm, factors):
    from megatron.core.optimizer import clip_grads

    gradient_norm.install()
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, 2.0, 3.0])
    told = []
    with gradient_norm.clipping_through(told.append):
        clip_grads.clip_grad_by_total_norm_fp32([parameter], 0.5, norm)
    assert told == pytest.approx(factors, rel=1e-5)
    assert parameter.grad.tolist() == [1.0, 2.0, 3.0]
    clip_grads.clip_grad_by_total_norm_fp32([parameter], 0.5, 1.0)
    assert parameter.grad.tolist() == pytest.approx([0.5, 1.0, 1.5], rel=1e-5)


def test_clipping_is_as_it_was_after_a_step_that_failed():
    from megatron.core.optimizer import clip_grads

    gradient_norm.install()
    with pytest.raises(RuntimeError), gradient_norm.clipping_through(print):
        raise RuntimeError
    assert clip_grads.multi_tensor_scale_impl is gradient_norm.scale
