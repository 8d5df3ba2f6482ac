"""The compiled AdamW against torch's own over several steps; the norm of all gradients, and the factor that clips them."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch._dynamo.utils import counters

from tprimat.megatron import compat, optimizer
from tprimat.megatron.compat import compiled_for_any_rows
from tprimat.megatron.optimizer import CompiledAdamW

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
        compiled_for_any_rows.cache_clear()
        yield
    compiled_for_any_rows.cache_clear()


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


def test_gradients_in_bf16_are_computed_with_in_fp32():
    rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(5))
    weights = [torch.nn.Parameter(torch.ones(64, 32)) for _ in range(2)]
    compiled, plain = CompiledAdamW(weights[:1], **SETTINGS), torch.optim.AdamW(weights[1:], **SETTINGS)
    compiled.gradient_factor = torch.full((1,), 1 / 3)
    weights[0].grad_dtype = torch.bfloat16
    for step in range(1, 4):
        weights[0].grad = (rows * step).bfloat16()
        weights[1].grad = weights[0].grad.float() * (1 / 3)
        compiled.step()
        plain.step()
    assert torch.allclose(*weights, rtol=1e-6, atol=1e-7)
    assert compiled.state[weights[0]]["exp_avg"].dtype == torch.float32


class Sharing(DistributedOptimizer):
    """Megatron's optimizer over half of one weight, without what it needs of other ranks."""

    def __init__(self):
        self.is_stub_optimizer = False
        self.weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.weight.main_grad = torch.arange(8, dtype=torch.bfloat16)
        self.own = torch.nn.Parameter(torch.ones(4))
        self.model_float16_groups, self.shard_fp32_from_float16_groups = [[self.weight]], [[self.own]]
        self.model_fp32_groups, self.shard_fp32_groups = [[]], [[]]
        self.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
        self.config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False)

    def _get_model_param_range_map(self, param):
        return {"param": SimpleNamespace(start=4, end=8, size=4)}


def test_a_rank_hands_its_part_of_the_gradients_on_without_a_copy():
    copying, handing = Sharing(), Sharing()
    compat.hand_on_gradients(handing)
    for one in (copying, handing):
        one._copy_model_grads_to_main_grads()
        assert one.own.grad.tolist() == [4.0, 5.0, 6.0, 7.0]
    assert copying.own.grad.dtype == torch.float32
    assert handing.own.grad.dtype == torch.bfloat16
    assert handing.own.grad.data_ptr() == handing.weight.main_grad[4:].data_ptr()


def gradients():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,), (2, 2, 2))]


@pytest.mark.parametrize("norm", [0.0, 0.499, 2.0, float("inf"), float("nan")])
def test_the_factor_is_the_one_that_megatron_scales_gradients_with(norm):
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
