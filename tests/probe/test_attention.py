"""Attention probes against attention written out."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tprimat.probe import attention
from tprimat.probe.case import ProbeLog, measure, open_bench
from tprimat.probe.catalogue import records

CPU = torch.device("cpu")


def written_out(query, key, value):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_what_is_timed_is_causal_grouped_attention_and_the_gradients_of_its_operands(kv_heads):
    query = torch.randn(2, 8, 16, 4)
    key, value = torch.randn(2, kv_heads, 16, 4), torch.randn(2, kv_heads, 16, 4)
    assert torch.allclose(attention.forward(query, key, value), written_out(query, key, value), atol=1e-5)
    gradients = attention.prepare(attention.Operands(1, 16, kv_heads), True, CPU)()
    assert [tuple(gradient.shape[1:3]) for gradient in gradients] == [(32, 16), (kv_heads, 16), (kv_heads, 16)]


def test_flop_are_half_of_what_torch_counts_without_the_mask():
    for width in (128, 64):
        query, key, value = (torch.randn(1, 32, 64, width) for _ in range(3))
        with FlopCounterMode(display=False) as counter:
            written_out(query, key, value)
        cases = attention.both_passes("math", attention.Operands(1, 64, width=width))
        assert [case.flop for case in cases] == [counter.get_total_flops() / 2 * factor for factor in (1.0, 2.5)]


def test_a_processor_is_not_asked_for_kernels_of_gpus_and_refuses_them_with_torchs_reason():
    bench, log = open_bench(device=CPU), ProbeLog(None)
    measured = records("attention", None, (), bench, log)
    assert {record.variant: record.error for record in measured} == {"flash": None, "math": None}
    refused = measure(attention.both_passes("cudnn", attention.Operands(1, 64, attention.HEADS))[0], bench)
    assert refused.seconds == ()
    assert "No viable backend" in refused.error
