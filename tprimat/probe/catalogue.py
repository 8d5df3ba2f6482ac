"""Every probe and its cases: the one table from which they are measured."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from tprimat.probe import attention, collectives, gemm, pieces, transformer
from tprimat.probe.case import Bench, Call, Case, Effort, ProbeLog, run
from tprimat.records.schema import ProbeRecord

ELEMENT_BYTES = 4
ARRAY_BYTES, SMALL_ARRAY_BYTES = (2**28, 2**30, 2**32), (2**26,)
ARRAYS_MOVED = {"copy": 2, "triad": 3, "fill": 1}


def prepare_array(operation: str, elements: int, device: torch.device) -> Call:
    """Allocate the arrays and return the operation. copy: a = b; triad: a = b + 3 c; fill: a = 1."""
    a = torch.empty(elements, device=device)
    if operation == "fill":
        return partial(a.fill_, 1.0)
    b = torch.randn(elements, device=device)
    if operation == "copy":
        return partial(a.copy_, b)
    return partial(torch.add, b, torch.randn(elements, device=device), alpha=3.0, out=a)


def memory_cases(*, small: bool) -> list[Case]:
    """Return memory bandwidth: copy, triad and fill, over arrays far larger than any cache (McCalpin's STREAM, 1995).

    Bytes are counted as in STREAM: each array that an operation reads or writes counts once.
    """
    return [
        Case(
            kind=operation,
            shape={"array_bytes": size},
            dtype="fp32",
            bytes=arrays * size,
            prepare=partial(prepare_array, operation, size // ELEMENT_BYTES),
            effort=Effort(flush=False),
        )
        for operation, arrays in ARRAYS_MOVED.items()
        for size in (SMALL_ARRAY_BYTES if small else ARRAY_BYTES)
    ]


Models = tuple[gemm.ModelProducts, ...]
Make = Callable[[Sequence[str], Models, Bench], list[Case]]
"""Makes the cases of a probe from the dtypes of matrix products, the models whose products are measured, and the device."""


CASES: dict[str, Make] = {
    "gemm": lambda dtypes, models, bench: [
        *gemm.seed_cases(dtypes, small=bench.small),
        *gemm.model_cases(models, dtypes, small=bench.small),
    ],
    "memory": lambda _, __, bench: memory_cases(small=bench.small),
    "attention": lambda _, __, bench: attention.cases(small=bench.small, on_cpu=bench.device.type == "cpu"),
    "mlp": lambda _, __, bench: transformer.mlp_cases(small=bench.small),
    "transformer": lambda _, __, bench: transformer.cases(small=bench.small),
    "pieces": lambda _, __, bench: pieces.cases(small=bench.small, on_cpu=bench.device.type == "cpu"),
    # On several ranks.
    "collectives": lambda _, __, bench: collectives.cases(bench.machine.platform, bench.machine.gpus or 1, small=bench.small),
    "ddp": lambda _, __, bench: transformer.cases(small=bench.small, ranks=bench.machine.gpus),
    "overlap": lambda _, __, bench: collectives.overlap_cases(bench.machine.gpus or 1, small=bench.small),
}


def records(kind: str, dtypes: Sequence[str] | None, models: Models, bench: Bench, log: ProbeLog) -> Iterator[ProbeRecord]:
    """Measure one probe; `dtypes` are those of matrix products, None: all that the platform multiplies."""
    usable = [dtype for dtype in gemm.DTYPES if bench.machine.platform != "cpu" or dtype not in gemm.NOT_ON_A_CPU]
    yield from run(CASES[kind](usable if dtypes is None else dtypes, models, bench), bench, log)
