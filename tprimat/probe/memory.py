"""Memory bandwidth of the device: copy, triad and fill, over arrays far larger than any cache (McCalpin's STREAM, 1995).

Bytes are counted as in STREAM: each array that an operation reads or writes counts once.
"""

from functools import partial

import torch

from tprimat.probe.case import Call, Case, Effort

ELEMENT_BYTES = 4
ARRAY_BYTES, SMALL_ARRAY_BYTES = (2**28, 2**30, 2**32), (2**26,)
ARRAYS_MOVED = {"copy": 2, "triad": 3, "fill": 1}


def prepare(operation: str, elements: int, device: torch.device) -> Call:
    """Allocate the arrays and return the operation. copy: a = b; triad: a = b + 3 c; fill: a = 1."""
    a = torch.empty(elements, device=device)
    if operation == "fill":
        return partial(a.fill_, 1.0)
    b = torch.randn(elements, device=device)
    if operation == "copy":
        return partial(a.copy_, b)
    return partial(torch.add, b, torch.randn(elements, device=device), alpha=3.0, out=a)


def cases(*, small: bool) -> list[Case]:
    """Return every operation at every size."""
    return [
        Case(
            kind=operation,
            shape={"array_bytes": size},
            dtype="fp32",
            bytes=arrays * size,
            prepare=partial(prepare, operation, size // ELEMENT_BYTES),
            effort=Effort(flush=False),
        )
        for operation, arrays in ARRAYS_MOVED.items()
        for size in (SMALL_ARRAY_BYTES if small else ARRAY_BYTES)
    ]
