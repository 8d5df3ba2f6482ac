"""The parts of a mixture of experts one by one, against Megatron-Core's or against what they are by definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe.moe_utils import (
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
)

from tprimat.core.implementations import EMBEDDED
from tprimat.megatron import experts as rows
from tprimat.megatron.compat import grouped_matmul
from tprimat.megatron.experts import LENGTHS, order_by_expert
from tprimat.megatron.router import Choice, balance_loss, choose, sorted_places, within_capacity

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU's kernels with a CPU's: there is no GPU")


@st.composite
def choices(draw):
    """Experts of each token, all different, and the number of experts."""
    number = draw(st.integers(1, 7))
    each = draw(st.integers(1, number))
    tokens = draw(st.lists(st.permutations(range(number)), min_size=1, max_size=9))
    return torch.tensor([token[:each] for token in tokens]), number


@given(choices())
def test_places_sort_choices_by_expert_and_then_by_token(made):
    experts, number = made
    places, ends = sorted_places(experts, number)
    by_place = sorted(zip(places.flatten().tolist(), experts.flatten().tolist(), strict=True))
    assert [place for place, _ in by_place] == list(range(experts.numel()))
    flat = experts.flatten().tolist()
    assert [expert for _, expert in by_place] == sorted(flat)
    assert ends.tolist() == [sum(expert <= last for expert in flat) for last in range(number)]
    for expert in range(number):
        own = places[experts == expert]
        assert own.tolist() == sorted(own.tolist())


@given(choices(), st.floats(0.1, 3), st.integers(0, 99))
def test_an_expert_takes_what_megatrons_takes_and_dropped_choices_are_placed_behind(made, factor, seed):
    experts, number = made
    weights = 0.1 + torch.rand(experts.shape, generator=torch.Generator().manual_seed(seed))
    table = torch.zeros(len(experts), number).scatter_(1, experts, weights)
    _, taken = apply_router_token_dropping(table, table > 0, experts.shape[1], factor)
    kept = within_capacity(weights, experts, number, factor)
    wanted = taken.gather(1, experts)
    assert torch.equal(torch.ones_like(wanted) if kept is None else kept, wanted)
    places, ends = sorted_places(experts, number, kept)
    assert places.flatten().sort().values.tolist() == list(range(experts.numel()))
    assert ends.tolist() == taken.sum(0).cumsum(0).tolist()
    assert torch.equal(places < ends[-1], wanted)
    assert experts[wanted][places[wanted].argsort()].tolist() == sorted(experts[wanted].tolist())


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(0, 5))
def test_received_rows_are_read_in_the_order_of_experts(counts, spare):
    """A received row is named by its sender, its expert and its number among theirs."""
    received = [
        (rank, expert, row) for rank, by_expert in enumerate(counts) for expert, n in enumerate(by_expert) for row in range(n)
    ]
    source, ends = order_by_expert(torch.tensor(counts), len(received) + spare)
    ordered = [received[place] for place in source[: len(received)].tolist()]
    assert ordered == sorted(received, key=lambda row: (row[1], row[0], row[2]))
    assert ends.tolist() == [sum(expert <= last for _, expert, _ in received) for last in range(3)]
    assert all(0 <= place < max(1, len(received)) for place in source[len(received) :].tolist())


def test_each_row_is_multiplied_with_its_experts_weight():
    """The second expert has no row, and the last three rows belong to nobody."""
    data, weight, gradient = torch.randn(10, 16), torch.randn(3, 8, 16), torch.randn(10, 8)
    ends, expert_of = torch.tensor([4, 4, 7], dtype=torch.int32), [0, 0, 0, 0, 2, 2, 2]
    forward = torch.stack([weight[expert] @ row for expert, row in zip(expert_of, data, strict=False)])
    torch.testing.assert_close(grouped_matmul(data, weight.transpose(-2, -1), ends)[:7], forward, atol=1e-5, rtol=1e-5)
    back = torch.stack([weight[expert].T @ row for expert, row in zip(expert_of, gradient, strict=False)])
    torch.testing.assert_close(grouped_matmul(gradient, weight, ends)[:7], back, atol=1e-5, rtol=1e-5)
    of_weight = torch.stack([gradient[:4].T @ data[:4], torch.zeros(8, 16), gradient[4:7].T @ data[4:7]])
    torch.testing.assert_close(grouped_matmul(gradient.t(), data, ends), of_weight, atol=1e-5, rtol=1e-5)


CHOICES = {
    "mixtral": (Choice(experts_per_token=2, score="softmax", normalized=True, scale=1.0, groups=None, best_groups=None), False),
    "olmoe": (Choice(experts_per_token=3, score="softmax", normalized=False, scale=1.0, groups=None, best_groups=None), False),
    "deepseek": (Choice(experts_per_token=4, score="sigmoid", normalized=True, scale=2.5, groups=4, best_groups=2), True),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_is_megatrons(name):
    choice, biased = CHOICES[name]
    logits = torch.randn(50, 16)
    bias = torch.randn(16) * 0.3 if biased else None
    weights, experts = choose(logits, bias, choice)
    table, chosen = topk_routing_with_score_function(
        logits,
        choice.experts_per_token,
        use_pre_softmax=not choice.normalized,
        num_groups=choice.groups,
        group_topk=choice.best_groups,
        scaling_factor=choice.scale,
        score_function=choice.score,
        expert_bias=bias,
    )
    ours = torch.zeros(50, 16).scatter(1, experts, weights)
    torch.testing.assert_close(ours, table, atol=1e-6, rtol=1e-5)
    assert torch.equal(ours > 0, chosen)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balancing_loss_is_megatrons(score):
    """One micro-batch of three sequences, counted as one."""
    logits = torch.randn(30, 16)
    chosen, scores = compute_routing_scores_for_aux_loss(logits, 4, score)
    counts = chosen.sum(dim=0).float()
    theirs = switch_load_balancing_loss_func(scores, counts, 30, 4, 16, 0.5)
    ours = 0.5 * balance_loss(scores.view(10, 3, 16), (counts / 3).expand(3, 16), 10, 4)
    torch.testing.assert_close(ours, theirs)


def test_rows_move_to_their_places_and_add_up_again():
    x, weights, places = torch.randn(4, 6), torch.rand(4, 2), torch.tensor([[3, 0], [1, 7], [6, 2], [5, 4]])
    spread = rows.spread(x, places, weights)
    for token in range(4):
        for choice in range(2):
            torch.testing.assert_close(spread[places[token, choice]], x[token] * weights[token, choice])
    torch.testing.assert_close(rows.add_up(rows.spread(x, places), places), 2 * x)
    torch.testing.assert_close(rows.weights_gradient(x, rows.spread(x, places), places), (x * x).sum(1)[:, None].expand(4, 2))


@NEEDS_GPU
@pytest.mark.parametrize("width", [64, 7168])
def test_rows_on_a_gpu_move_as_on_a_cpu(width):
    x, gradient, weights = torch.randn(37, width).bfloat16(), torch.randn(37, width).bfloat16(), torch.rand(37, 3)
    places, many = torch.randperm(111).view(37, 3).int(), torch.randn(111, width).bfloat16()

    def moved(device):
        here = [part.to(device) for part in (x, places, weights, many, gradient)]
        tokens, to, factors, result, incoming = here
        return [
            rows.spread(tokens, to),
            rows.spread(tokens, to, factors),
            rows.add_up(result, to),
            rows.add_up(result, to, factors),
            rows.weights_gradient(incoming, result, to),
            rows.gather(result, to.flatten()[:50]),
        ]

    for on_gpu, on_cpu in zip(moved("cuda"), moved("cpu"), strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=2e-2, rtol=2e-2)


def test_the_prediction_of_memory_knows_the_steps_of_the_buffers():
    assert EMBEDDED.received_rows_step == 1 / LENGTHS
