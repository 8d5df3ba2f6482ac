"""Attention of one piece of a sequence to everything before it, by two kernels, against torch's attention with a mask."""

import pytest
import torch
import torch.nn.functional as F

from tprimat.megatron import attention
from tprimat.megatron.attention import attend, kernels_for
from tprimat.megatron.compat import CudnnAttention

NO_GPU = "runs cuDNN's kernels: there is no GPU"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU))]


class CpuAttention(CudnnAttention):
    """torch's for processors, which takes as many key/value heads as heads."""

    def forward(self, query, key, value, *, causal):
        times = query.shape[1] // key.shape[1]
        wide = [part.repeat_interleave(times, dim=1) for part in (key, value)]
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, *wide, 0.0, causal)
        return out, sums.unsqueeze(-1), None

    def backward(self, gradient, operands, results, state, *, causal):
        (query, *narrow), (out, sums) = operands, results
        times = query.shape[1] // narrow[0].shape[1]
        wide = [part.repeat_interleave(times, dim=1) for part in narrow]
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_query, *rest = differentiate(gradient, query, *wide, out, sums.squeeze(-1), 0.0, causal)
        return of_query, *(part.unflatten(1, (-1, times)).sum(dim=2) for part in rest)


def operands(device="cpu", before=0, kv_heads=2, tokens=32, dtype=torch.float32):
    generator = torch.Generator().manual_seed(before)
    shapes = ((2, 4, tokens, 64), (2, kv_heads, before + tokens, 64), (2, kv_heads, before + tokens, 64))
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def differentiated(call, given):
    out = call(*given)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    return [out, *torch.autograd.grad(out, given, gradient)]


def with_mask(query, key, value):
    before = key.shape[2] - query.shape[2]
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(before)
    times = query.shape[1] // key.shape[1]
    return F.scaled_dot_product_attention(
        query, key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), attn_mask=mask
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("before", [0, 32, 96])
def test_two_kernels_give_what_a_mask_gives(monkeypatch, device, before, kv_heads):
    dtype, near = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 3e-2)
    given = operands(device, before, kv_heads, 32 if device == "cpu" else 128, dtype)
    if device == "cpu":
        monkeypatch.setattr(attention, "kernels_for", lambda *_: CpuAttention())
    else:
        assert kernels_for(given[0], given[2]) is not None
    for ours, wanted in zip(differentiated(attend, given), differentiated(with_mask, given), strict=True):
        torch.testing.assert_close(ours, wanted, atol=near, rtol=near)


def test_without_kernels_torch_attends_with_the_mask():
    given = operands(before=32)
    assert kernels_for(given[0], given[2]) is None
    for ours, wanted in zip(differentiated(attend, given), differentiated(with_mask, given), strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
