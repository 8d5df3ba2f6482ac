"""Attention probes against attention written out."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tprimat.probe import attention
from tprimat.probe.case import measure, open_bench, open_log
from tprimat.probe.catalogue import PROBES, Choice

CPU = torch.device("cpu")


def written_out(query, key, value):
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_what_is_timed_is_causal_grouped_attention(kv_heads):
    query = torch.randn(2, 8, 16, 4)
    key, value = torch.randn(2, kv_heads, 16, 4), torch.randn(2, kv_heads, 16, 4)
    assert torch.allclose(attention.forward(query, key, value), written_out(query, key, value), atol=1e-5)


def test_backward_gives_the_gradients_of_all_three_operands():
    call = attention.prepare(attention.Operands(1, 16), True, CPU)
    assert [tuple(gradient.shape[1:3]) for gradient in call()] == [(32, 16), (8, 16), (8, 16)]
    assert len(call()) == 3


@pytest.mark.parametrize("width", [128, 64])
@pytest.mark.parametrize(("backward", "factor"), [(False, 1.0), (True, 2.5)])
def test_flop_are_half_of_what_torch_counts_without_the_mask(backward, factor, width):
    query, key, value = (torch.randn(1, 32, 64, width, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        written_out(query, key, value)
    assert attention.flop(attention.Operands(1, 64, width=width), backward=backward) == counter.get_total_flops() / 2 * factor


def test_every_length_attends_to_the_same_number_of_tokens():
    shapes = [case.shape for case in attention.cases(small=False)]
    assert {shape["batch"] * shape["sequence"] for shape in shapes} == {32768}
    assert {shape["sequence"] for shape in shapes} == {2048, 4096, 8192, 16384, 32768}


def test_a_backend_that_a_processor_lacks_is_recorded_with_torchs_reason():
    record = measure(
        attention.case_of("cudnn", attention.Operands(1, 64, attention.HEADS), backward=False), open_bench(device=CPU)
    )
    assert record.seconds == ()
    assert "No viable backend" in record.error


def test_a_processor_is_not_asked_for_kernels_of_gpus():
    messages = []
    log = open_log(None, resume=False, seconds=None, tell=messages.append)
    records = list(PROBES["attention"](Choice(dtypes=(), workloads=()), open_bench(device=CPU), log))
    assert {record.variant: record.error for record in records} == {"flash": None, "math": None}
    assert messages[0] == "attention: cudnn and efficient are left out, which a CPU does not have."
    assert [message.split()[0] for message in messages[1:]] == [f"{number}/8" for number in range(1, 9)]
