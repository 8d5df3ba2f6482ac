"""The exchange through shared memory on simulated streams gives the sums in any order that they allow; and where it is tried."""

import random
from types import SimpleNamespace

import pytest
import torch
from simulated_streams import Event, Machine

from tprimat.megatron import compat, tp_overlap
from tprimat.megatron.tp_overlap import Exchange, can_overlap

EXCHANGES, SEEDS = 10, 10
KINDS = ("gather", "scatter", "behind")


@pytest.fixture
def machine(monkeypatch):
    """Makes one; its streams stand where torch's do."""

    def make(ranks):
        made = Machine(ranks)
        for name in ("Stream", "current_stream", "current_device", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(made, name))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(compat, "symmetric_memory", lambda: made)
        monkeypatch.setattr(tp_overlap, "compiled", lambda function: function)
        return made

    return make


def numbers(*shape, seed):
    """Small whole ones, whose sums are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def exchanges_of(seed):
    """Kinds, rows of a rank and widths, the same on all ranks."""
    choose = random.Random(seed)
    return [(choose.choice(KINDS), choose.choice((1, 2, 5)), choose.choice((2, 3, 8)), place) for place in range(EXCHANGES)]


def operands(step, rank, ranks):
    kind, rows, width, place = step
    shape = (rows, width) if kind == "gather" else (ranks * rows, width)
    return numbers(*shape, seed=100 * place + rank), numbers(width, 4, seed=100 * place + 50 + rank)


def into(matrix):
    return lambda rows, out: torch.mm(rows, matrix, out=out)


def run(machine, exchange, steps, rank, anew_every):
    """A rank's code, whose operands are let go after each step; returns what it gets. It begins anew after some steps each."""
    results = []
    for step in steps:
        left, right = (machine.tensor(part) for part in operands(step, rank, machine.ranks))
        kind, multiply = step[0], into(right)
        with machine.as_rank(rank):
            if kind == "gather":
                out = left.new_empty((machine.ranks * left.shape[0], right.shape[1]))
                results.append((exchange.gather_and_multiply(left, multiply, out), out))
            elif kind == "scatter":
                results.append((exchange.multiply_and_reduce_scatter(left, multiply, right.shape[1], right.dtype),))
            else:
                coming = exchange.start_reduce_scatter(left, multiply, right.shape[1], right.dtype)
                _ = torch.mm(left, right)
                results.append((coming(),))
                del coming
            if anew_every and (step[-1] + 1) % anew_every == 0:
                exchange.begin_anew()
        del left, right, multiply
    return results


def expected(steps, rank, ranks):
    results = []
    for step in steps:
        pairs = [operands(step, other, ranks) for other in range(ranks)]
        if step[0] == "gather":
            full = torch.cat([left for left, _ in pairs])
            results.append((full, full @ pairs[rank][1]))
        else:
            results.append((sum(left @ right for left, right in pairs).chunk(ranks)[rank],))
    return results


def all_right(machine, ranks, seed, anew_every=None, **way):
    made, steps = machine(ranks), exchanges_of(seed)
    got = []
    for rank in range(ranks):
        made.rank = rank
        exchange = Exchange(SimpleNamespace(group_name="tensor", rank=lambda rank=rank: rank, size=lambda: ranks))
        got.append(run(made, exchange, steps, rank, anew_every))
    made.work(seed, **way)
    return all(
        torch.equal(one, other)
        for rank in range(ranks)
        for parts, wanted in zip(got[rank], expected(steps, rank, ranks), strict=True)
        for one, other in zip(parts, wanted, strict=True)
    )


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_right_in_any_order_that_the_streams_allow(machine, ranks, one_queue):
    assert all(all_right(machine, ranks, seed, one_queue=one_queue) for seed in range(SEEDS))


@pytest.mark.parametrize("every", [1, 3])
def test_sums_are_right_where_exchanges_begin_anew_after_an_odd_number(machine, every):
    assert all(all_right(machine, 3, seed, anew_every=every) for seed in range(SEEDS))


def test_the_simulation_notices_a_new_beginning_without_a_barrier(machine, monkeypatch):
    def forget(exchange):
        for workspace in exchange._workspaces.values():
            workspace.turn = 0

    monkeypatch.setattr(Exchange, "begin_anew", forget)
    assert not all(all_right(machine, 3, seed, anew_every=1) for seed in range(SEEDS))


@pytest.mark.parametrize("method", ["wait_stream", "wait_event"])
def test_the_simulation_notices_a_wait_that_is_missing(machine, monkeypatch, method):
    monkeypatch.setattr(f"simulated_streams.Stream.{method}", lambda *_: None)
    assert not all(all_right(machine, 2, seed) for seed in range(SEEDS))


def gpus(monkeypatch, groups, *, hip=None):
    """A machine whose GPUs read each other's memory within each of the groups."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 + max(gpu for group in groups for gpu in group))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: any({a, b} <= set(group) for group in groups))


def test_exchanges_are_tried_where_every_rank_of_a_group_reads_every_others_memory(monkeypatch):
    assert not can_overlap(2, 2)
    gpus(monkeypatch, [(0, 1), (2, 3)])
    assert can_overlap(2, 4)
    assert not can_overlap(4, 4)
    assert not can_overlap(8, 4)  # over two machines
    gpus(monkeypatch, [range(2)], hip="7.0")
    assert not can_overlap(2, 2)
