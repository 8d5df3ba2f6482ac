"""Matrix products by the fastest of cuBLASLt's algorithms, found while training runs.

The problem: for one product cuBLASLt offers several algorithms, which differ in tiles, clusters and the order of tiles, and torch
runs the first. Its order of preference is made for a GPU at full clock. In training a GPU is often at its power limit, where the
clock falls with the energy that a product needs, and another algorithm may be faster: by up to 5 % in bf16 and 6 % in fp8 on an
H200 at 700 W (benchmarks/product_algorithms.py).

What is done: the first calls of each product run the algorithms in turn, and the device's clock times each call where it stands,
under the power limit and between its real neighbours. Slow algorithms leave after a few calls, and the fastest stays. No call is
wasted, since every algorithm computes the same product, and the race takes the first steps, which are warm-up anyway.
Nothing waits for the device: a timing is read once its call is over.

Why it is right: the algorithms sum the same products in fp32, in another order. Where the first choice is about as fast as any,
torch's own call remains. Unaligned addresses, other dtypes, and products whose shapes keep changing are left to torch.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tprimat.megatron import cublaslt
from tprimat.megatron.cublaslt import PreparedProduct, Product

MOST_ALGORITHMS = 8
"""cuBLASLt 13 suggests no more."""
ROUNDS = ((2, 0.08), (6, 0.03), (16, 0.0))
"""Timings of each algorithm still in the race -> an algorithm slower than the fastest by more than this fraction leaves."""
MARGIN = 0.007
"""An algorithm must be faster than cuBLASLt's first choice by this fraction."""
MOST_PRODUCTS = 128
"""Where shapes vary from call to call, nothing is gained by a race for each."""


class Race:
    """Which of several algorithms is fastest, from timings that arrive late. The first of each does not count."""

    def __init__(self, runners: int) -> None:
        self._started = [0] * runners
        self._times: list[list[float]] = [[] for _ in range(runners)]
        self._left = list(range(runners))
        self._rounds = deque(ROUNDS)
        self.winner: int | None = 0 if runners == 1 else None

    def start(self) -> int:
        """Return the algorithm whose turn it is."""
        runner = min(self._left, key=self._started.__getitem__)
        self._started[runner] += 1
        return runner

    def finish(self, runner: int, seconds: float) -> None:
        """Take a timing."""
        self._times[runner].append(seconds)
        while self._rounds and all(len(self._times[one]) > self._rounds[0][0] for one in self._left):
            _, allowed = self._rounds.popleft()
            best = min(map(self.median, self._left))
            self._left = [one for one in self._left if self.median(one) <= best * (1 + allowed)]
        if not self._rounds:
            self.end()

    def end(self) -> None:
        """Declare the winner by the timings so far."""
        if self.winner is None:
            fastest = min(self._left, key=self.median)
            self.winner = fastest if self.median(fastest) < (1 - MARGIN) * self.median(0) else 0

    def median(self, runner: int) -> float:
        """Return the middle of its timings so far, infinite without any."""
        return statistics.median(self._times[runner][1:] or [float("inf")])


class Form(NamedTuple):
    """How the operands of a @ b are stored."""

    a_transposed: bool = False
    """`a` is stored as (k, m)."""
    b_transposed: bool = False
    """`b` is stored as (n, k)."""
    fast: bool = False
    """Sum 8-bit products in the matrix unit's own precision."""


PLAIN, TRANSPOSED_WEIGHT, TRANSPOSED_ROWS = Form(), Form(b_transposed=True), Form(a_transposed=True)
Key = tuple[torch.Size, torch.Size, torch.dtype, torch.dtype, torch.dtype, Form, float, int]
"""Shapes, dtypes of a, b and total, form, beta and alignment: what an algorithm is chosen for."""
DTYPES = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
Timing = tuple[int, torch.cuda.Event, torch.cuda.Event]


@dataclass(eq=False)
class TunedProduct:
    """One product of one shape, and the race of its algorithms."""

    prepared: PreparedProduct
    race: Race
    running: deque[Timing] = field(default_factory=deque)
    """Calls whose timings were not read yet."""

    def run(self, total: Tensor, a: Tensor, b: Tensor, *, alpha: float, beta: float) -> None:
        """Total = alpha a @ b + beta total."""
        if self.race.winner is not None:
            cublaslt.run(self.prepared, total, (a, b), choice=self.race.winner, alpha=alpha, beta=beta)
            return
        runner = self.race.start()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        cublaslt.run(self.prepared, total, (a, b), choice=runner, alpha=alpha, beta=beta)
        end.record()
        self.running.append((runner, start, end))
        self.read_timings()

    def read_timings(self) -> None:
        """Take the timings of the calls that are over."""
        while self.running and self.running[0][2].query():  # type: ignore[no-untyped-call]
            earlier, began, ended = self.running.popleft()
            self.race.finish(earlier, began.elapsed_time(ended) / 1e3)


class Tuner:
    """The products of this process: those that have been tuned, and those left to torch."""

    def __init__(self) -> None:
        self.on = False
        self._products: dict[Key, TunedProduct | None] = {}
        self._settled = False

    def run(  # noqa: PLR0913 - a product has this many parts
        self,
        a: Tensor,
        b: Tensor,
        total: Tensor | None = None,
        *,
        form: Form = TRANSPOSED_WEIGHT,
        alpha: float = 1.0,
        beta: float = 0.0,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | None:
        """Return total = alpha a @ b + beta total, or None where torch should compute it, and nothing was done.

        Args:
            a: shape (m, k), bf16 or 8-bit.
            b: shape (k, n).
            total: shape (m, n), contiguous; None: a new one, bf16.
            form: how both are stored.
            alpha: a factor.
            beta: 0 or 1.
            scales: of 8-bit operands, what undoes their scaling, each of shape ().
        """
        if not (self.on and a.is_cuda and a.is_contiguous() and b.is_contiguous()):
            return None
        alignment = cublaslt.alignment_of(a, b, total)
        into = torch.bfloat16 if total is None else total.dtype
        key = (a.shape, b.shape, a.dtype, b.dtype, into, form, beta, alignment)
        if key not in self._products:
            self._products[key] = None if self._settled else self._raced(key, a.device.index)
        tuned = self._products[key]
        if tuned is None or tuned.race.winner == 0:
            return None
        if total is None:
            total = a.new_empty((a.shape[form.a_transposed], b.shape[not form.b_transposed]), dtype=into)
        if scales is not None:
            cublaslt.set_scales(tuned.prepared, *scales)
        tuned.run(total, a, b, alpha=alpha, beta=beta)
        return total

    def settle(self) -> None:
        """End all races by the timings so far, and begin no more: a CUDA graph cannot time what it records."""
        self._settled = True
        if self.on:
            torch.cuda.synchronize()
        for tuned in self._products.values():
            if tuned is not None:
                tuned.read_timings()
                tuned.race.end()

    def _raced(self, key: Key, device: int) -> TunedProduct | None:
        """Begin the race of a product; None where torch should compute it."""
        a_shape, b_shape, a, b, into, form, _, alignment = key
        if alignment == 1 or a not in DTYPES or len(self._products) >= MOST_PRODUCTS:
            return None
        m, k, n = a_shape[form.a_transposed], a_shape[not form.a_transposed], b_shape[not form.b_transposed]
        flags = {"a_transposed": form.a_transposed, "b_transposed": form.b_transposed, "fast": form.fast}
        product = Product(m, n, k, a, b, into, **flags, scaled=a is not torch.bfloat16)
        try:
            prepared = cublaslt.prepare(device, product, MOST_ALGORITHMS, alignment)
        except RuntimeError:  # none suits
            return None
        return TunedProduct(prepared, Race(len(prepared.algorithms)))


TUNER = Tuner()
"""Of this process, which trains one model."""


def tunes_on(device: torch.device) -> bool:
    """Whether cuBLASLt can be asked on this device: tried on small products and compared with torch's."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    generator = torch.Generator(device).manual_seed(0)
    rows, weight, gradient = (
        torch.randn(shape, device=device, generator=generator).bfloat16() for shape in ((64, 32), (48, 32), (64, 48))
    )
    tuner, total = Tuner(), torch.ones(48, 32, device=device)
    tuner.on = True
    try:
        tuned = (
            tuner.run(rows, weight),
            tuner.run(gradient, weight, form=PLAIN),
            tuner.run(gradient, rows, total, form=TRANSPOSED_ROWS, alpha=2.0, beta=1.0),
        )
    except (OSError, AttributeError, RuntimeError):  # no such library, or not for this device
        return False
    expected = (rows @ weight.t(), gradient @ weight, 1 + 2 * gradient.float().t() @ rows.float())
    return all(
        got is not None and torch.allclose(got.float(), wanted.float(), rtol=0.02, atol=0.1)
        for got, wanted in zip(tuned, expected, strict=True)
    )
