"""The norm and the clipping of all gradients together, against torch's own for one long vector."""

import pytest
import torch
import torch.distributed as dist

from tprimat.megatron import optimizer


def gradients():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,), (2, 2, 2))]


@pytest.mark.parametrize("norm", [0.0, 0.499, 2.0, float("inf"), float("nan")])
def test_the_factor_is_the_one_that_megatron_scales_gradients_with(norm):
    from megatron.core.optimizer import clip_grads

    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, 2.0, 3.0])
    factor = optimizer.clipping_factor(torch.tensor([norm]), 0.5)
    ours = parameter.grad * factor
    clip_grads.clip_grad_by_total_norm_fp32([parameter], 0.5, norm)
    assert factor.shape == (1,)
    assert torch.allclose(ours, parameter.grad, rtol=1e-6, atol=0)


def test_the_norm_counts_the_gradients_of_every_optimizer_and_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        norm = optimizer.norm_over_ranks([(held, None) for held in (gradients(), [], gradients()[:1])])
    finally:
        dist.destroy_process_group()
    whole = torch.cat([tensor.flatten() for tensor in [*gradients(), gradients()[0]]])
    assert norm.shape == (1,)
    assert norm.item() == pytest.approx(whole.norm().item(), rel=1e-6)
