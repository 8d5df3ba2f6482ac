"""A search for the fastest product that this device can do: the ceiling that a training step is held against.

A coordinate scan: from the fastest of the table's shapes, each side in turn is tried at every length of a fixed list while the
other two stay; the fastest is kept, and the scan goes round until a whole round brings nothing or the time is spent. Every
candidate is timed briefly and recorded (kind gemm_search). The winner is then timed anew at full effort and recorded as a gemm:
the fastest of many brief timings is a lucky one, and a fresh measurement is not.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from tprimat.probe.case import Bench, Case, Notebook, identity, keep, measure, outcome
from tprimat.probe.gemm import FP8_CALLS, SEED_SHAPES, Product, case_of
from tprimat.probe.timing import Effort
from tprimat.records.schema import ProbeRecord

KIND = "gemm_search"
SIDES = (1024, 2048, 3072, 4096, 5120, 6144, 8192, 10240, 12288, 14336, 16384, 18432, 20480)
SMALL_SIDES = (64, 128, 256)
BRIEF = Effort(warmup=3, repetitions=10, seconds=0.2)
SECONDS = 12.0
SMALL_SECONDS = 1.0
SEARCHED_DTYPES = ("bf16", "fp8")
SUFFIX = "searched"


def call_of(dtype: str) -> str:
    """The call whose best shape is looked for."""
    return FP8_CALLS[0] if dtype == "fp8" else "torch.matmul"


def candidate(product: Product, dtype: str) -> Case:
    """One product, timed briefly."""
    return replace(case_of(product, dtype, call_of(dtype)), kind=KIND, effort=BRIEF)


def rate(record: ProbeRecord) -> float:
    """FLOP/s, 0 for a product that was refused: it cannot win."""
    return (record.flop or 0) / median(record.seconds) if record.seconds else 0.0


def neighbours(product: Product, sides: tuple[int, ...]) -> Iterator[Product]:
    """The products that differ from this one in one side; one list after another."""
    for side in sides:
        yield Product(m=side, k=product.k, n=product.n)
    for side in sides:
        yield Product(m=product.m, k=side, n=product.n)
    for side in sides:
        yield Product(m=product.m, k=product.k, n=side)


def search(dtype: str, bench: Bench, notebook: Notebook) -> Iterator[ProbeRecord]:
    """Scan, then measure the winner. What was searched before on this machine with this software is not searched again."""
    found = known_winner(dtype, bench, notebook)
    if found or notebook.late:
        yield from (found,) if found else ()
        return
    sides = SMALL_SIDES if bench.small else SIDES
    ends = time.monotonic() + (SMALL_SECONDS if bench.small else SECONDS)
    tried: dict[Product, float] = {}
    round_of = list(dict.fromkeys(starts(small=bench.small)))
    best = before = None
    while best is None or (before != best and time.monotonic() < ends):
        before = best
        for product in round_of:
            if product not in tried and (not tried or time.monotonic() < ends):
                record = measure(candidate(product, dtype), bench)
                keep(record, notebook)
                tried[product] = rate(record)
                yield record
        best = max(tried, key=lambda product: tried[product])
        round_of = list(neighbours(best, sides))
    yield from measure_winner(best, dtype, bench, notebook)


def starts(*, small: bool) -> Iterator[Product]:
    """Where the scan begins: a search that knew less than the tables would find less than they hold."""
    for m, k, n in ((SMALL_SIDES[-1],) * 3,) if small else SEED_SHAPES.values():
        yield Product(m=m, k=k, n=n)


def measure_winner(best: Product, dtype: str, bench: Bench, notebook: Notebook) -> Iterator[ProbeRecord]:
    """The best product anew, at full effort."""
    case = replace(case_of(best, dtype, call_of(dtype)), variant=f"{call_of(dtype)} {SUFFIX}")
    record = measure(case, bench)
    keep(record, notebook)
    notebook.tell(f"{case.title}: {record.error or outcome(record)}")
    yield record


def known_winner(dtype: str, bench: Bench, notebook: Notebook) -> ProbeRecord | None:
    """The result of an earlier search."""
    variant = f"{call_of(dtype)} {SUFFIX}"
    for record in notebook.known.values():
        if record.variant == variant and record.dtype == dtype and identity(record)[-2:] == identity_of(bench):
            return record
    return None


def identity_of(bench: Bench) -> tuple[object, ...]:
    """The machine and software part of an identity."""
    return bench.machine, tuple(sorted(bench.software.items()))
