"""Which algorithm wins a race, and that all of them compute the same product on a GPU."""

import random
from collections import deque

import pytest
import torch

from tprimat.megatron import fp8
from tprimat.megatron.tuned_products import PLAIN, TRANSPOSED_ROWS, TRANSPOSED_WEIGHT, Race, Tuner, tunes_on

ON_GPU = pytest.mark.skipif(not tunes_on(torch.device("cuda")), reason="needs an NVIDIA GPU")
HAS_FP8_GPU = torch.cuda.is_available() and fp8.multiplies_fp8(torch.device("cuda"))


def raced(true_seconds, noise, seed, late=0):
    """Run a race whose timings scatter, and arrive some calls late; return it and the number of calls it took."""
    generator, race, under_way = random.Random(seed), Race(len(true_seconds)), deque()
    for calls in range(1, 1000):
        runner = race.start()
        under_way.append((runner, true_seconds[runner] * generator.gauss(1, noise)))
        if len(under_way) > late:
            race.finish(*under_way.popleft())
        if race.winner is not None:
            return race, calls
    raise AssertionError("the race did not end")


@pytest.mark.parametrize("late", [0, 7, 60])
def test_the_fastest_wins_although_timings_scatter_and_come_late(late):
    seconds = [1.0, 1.1, 1.01, 0.96, 1.3, 1.02, 1.05, 1.0]
    winners = [raced(seconds, 0.01, seed, late)[0].winner for seed in range(40)]
    assert winners == [3] * 40


def test_the_first_choice_stays_where_no_other_is_clearly_faster():
    winners = [raced([1.0, 1.002, 0.998, 1.2], 0.003, seed)[0].winner for seed in range(40)]
    assert winners == [0] * 40


def test_slow_ones_cost_few_calls():
    race, calls = raced([1.0, *[1.2] * 7], 0.005, 1)
    assert race.winner == 0
    assert calls < 60


def test_a_slow_first_call_of_an_algorithm_does_not_count():
    race, seconds = Race(2), [1.0, 0.9]
    seen = set()
    while race.winner is None:
        runner = race.start()
        race.finish(runner, seconds[runner] if runner in seen else 50.0)
        seen.add(runner)
    assert race.winner == 1


def test_one_algorithm_needs_no_race():
    assert Race(1).winner == 0


def test_a_cpu_computes_by_torch():
    tuner = Tuner()
    tuner.on = True
    assert not tunes_on(torch.device("cpu"))
    assert tuner.run(torch.ones(16, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16)) is None


def operands(form, dtype=torch.bfloat16, m=256, n=512, k=1024):
    torch.manual_seed(0)
    a = torch.randn(m, k, device="cuda").to(dtype)
    b = torch.randn(k, n, device="cuda").to(dtype)
    stored = (a.t().contiguous() if form.a_transposed else a, b.t().contiguous() if form.b_transposed else b)
    return stored, a.float() @ b.float()


def until_decided(tuner, call):
    """Call until every race is over, and once more; return all results that came from cuBLASLt."""
    results = []
    for _ in range(600):
        results.append(call())
        torch.cuda.synchronize()
        if results[-1] is None:
            break
    return [result for result in results if result is not None]


@ON_GPU
@pytest.mark.parametrize("form", [PLAIN, TRANSPOSED_WEIGHT, TRANSPOSED_ROWS])
def test_every_algorithm_of_the_race_computes_the_product(form):
    (a, b), expected = operands(form)
    tuner = Tuner()
    tuner.on = True
    for result in until_decided(tuner, lambda: tuner.run(a, b, form=form)):
        assert torch.allclose(result.float(), expected, rtol=0.02, atol=0.3)


@ON_GPU
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_every_algorithm_adds_to_what_is_there(beta):
    (a, b), expected = operands(TRANSPOSED_ROWS)
    tuner = Tuner()
    tuner.on = True

    def call():
        total = torch.full_like(expected, 3.0 if beta else torch.nan)
        return tuner.run(a, b, total, form=TRANSPOSED_ROWS, alpha=0.5, beta=beta)

    for result in until_decided(tuner, call):
        assert torch.allclose(result, 0.5 * expected + 3.0 * beta, rtol=1e-3, atol=1e-2)


@pytest.mark.skipif(not HAS_FP8_GPU, reason="needs a GPU that multiplies 8-bit numbers")
@pytest.mark.parametrize("fast", [False, True])
def test_every_algorithm_multiplies_8_bit_numbers(fast):
    x, w = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((256, 1024), (512, 1024)))
    (a, _, a_scale), (b, _, b_scale) = (fp8.convert(one, fp8.FORWARD_DTYPE) for one in (x, w))
    expected = (a.float() * a_scale) @ (b.float() * b_scale).t()
    tuner = Tuner()
    tuner.on = True
    form = fp8.FAST if fast else TRANSPOSED_WEIGHT
    for result in until_decided(tuner, lambda: tuner.run(a, b, form=form, scales=(a_scale, b_scale))):
        assert torch.allclose(result.float(), expected, rtol=0.02, atol=0.5)


@ON_GPU
def test_odd_addresses_gaps_and_other_dtypes_are_left_to_torch():
    (a, b), expected = operands(TRANSPOSED_WEIGHT)
    tuner = Tuner()
    tuner.on = True
    room = torch.empty(a.numel() + 8, device="cuda", dtype=torch.bfloat16)
    for offset, tuned in ((8, True), (3, False)):
        moved = room[offset : offset + a.numel()].view_as(a).copy_(a)
        result = tuner.run(moved, b)
        assert (result is not None) == tuned
        assert result is None or torch.allclose(result.float(), expected, rtol=0.02, atol=0.3)
    assert tuner.run(a[:, ::2], b[:, ::2]) is None
    assert tuner.run(a.float(), b.float()) is None
