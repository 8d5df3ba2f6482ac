"""Collective operations over the ranks of one machine, from 64 KiB to 1 GiB.

The size of a message is what nccl-tests calls size (doc/PERFORMANCE.md): the whole buffer that a rank holds of the larger
side, so all-gather's output and reduce-scatter's input. Send-recv passes a message round a ring, each rank sending and
receiving. A sample is the time on the slowest rank. Bandwidths are derived from records in analyze/probes.py.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import distributed

from tprimat.probe.case import Case
from tprimat.probe.timing import Call, Effort

DTYPE = "fp32"
BYTES_OF_ELEMENT = 4
SIZES = tuple(2**power for power in range(16, 31, 2))
"""64 KiB to 1 GiB in steps of four."""
SMALL_SIZES = (2**16, 2**18)


def effort(size: int) -> Effort:
    """A fixed number of calls, since every rank must make the same."""
    repetitions, warmup = (200, 30) if size <= 2**20 else (50, 10) if size <= 2**26 else (20, 5)
    return Effort(warmup=warmup, repetitions=repetitions, warmup_seconds=None, relative_interval=None, seconds=None)


def newest(operation: str) -> Callable[..., object]:
    """The one-tensor form: torch 2.13 renamed it and warns at each call of the old name."""
    names = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    found: Callable[..., object] = getattr(distributed, f"{operation}_single", None) or getattr(distributed, names[operation])
    return found


def all_reduce(buffer: torch.Tensor, ranks: int) -> Call:
    """The mean of all ranks' buffers, on every rank: repeated in place it stays finite, as a sum would not. Gloo has no mean."""
    averages = distributed.get_backend() == "nccl"
    return partial(distributed.all_reduce, buffer, op=distributed.ReduceOp.AVG if averages else distributed.ReduceOp.MAX)


def all_gather(buffer: torch.Tensor, ranks: int) -> Call:
    """Every rank's part, on every rank."""
    return partial(newest("all_gather"), buffer, buffer.chunk(ranks)[0].clone())


def reduce_scatter(buffer: torch.Tensor, ranks: int) -> Call:
    """A part of the sum of all ranks' buffers on each rank."""
    return partial(newest("reduce_scatter"), torch.empty_like(buffer.chunk(ranks)[0]), buffer)


def all_to_all(buffer: torch.Tensor, ranks: int) -> Call:
    """A part of every rank's buffer on each rank."""
    return partial(distributed.all_to_all_single, torch.empty_like(buffer), buffer)


def send_recv(buffer: torch.Tensor, ranks: int) -> Call:
    """To the next rank of a ring, and from the one before."""
    rank, received = distributed.get_rank(), torch.empty_like(buffer)

    def exchange() -> None:
        sending = distributed.P2POp(distributed.isend, buffer, (rank + 1) % ranks)
        receiving = distributed.P2POp(distributed.irecv, received, (rank - 1) % ranks)
        for work in distributed.batch_isend_irecv([sending, receiving]):
            work.wait()

    return exchange


OPERATIONS: dict[str, Callable[[torch.Tensor, int], Call]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "send_recv": send_recv,
}


def prepare(operation: str, size: int, device: torch.device) -> Call:
    """A buffer on this rank, and the operation as a call. The process group is there already."""
    ranks = distributed.get_world_size()
    elements = size // BYTES_OF_ELEMENT // ranks * ranks
    return OPERATIONS[operation](torch.randn(elements, device=device), ranks)


def cases(backend: str, ranks: int, *, small: bool) -> list[Case]:
    """Every operation at every size. `bytes` is the message as the ranks can divide it."""
    return [
        Case(
            kind=operation,
            variant=backend,
            shape={"message_bytes": size, "ranks": ranks},
            dtype=DTYPE,
            bytes=size // BYTES_OF_ELEMENT // ranks * ranks * BYTES_OF_ELEMENT,
            prepare=partial(prepare, operation, size),
            effort=effort(size),
        )
        for operation in OPERATIONS
        for size in (SMALL_SIZES if small else SIZES)
    ]
