"""Collective operations over the ranks of one machine, from 64 KiB to 1 GiB, alone and beside products.

The message size is nccl-tests' size (doc/PERFORMANCE.md): the whole buffer of a rank on the larger side, so the output of
all-gather and the input of reduce-scatter. Send-recv passes a message round a ring, each rank sending and receiving. A sample is
the time on the slowest rank. analyze/probes.py derives bandwidths from the records.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from tprimat.probe import gemm
from tprimat.probe.case import Bench, Call, Case, Effort, open_bench

ELEMENT_BYTES = 4
SIZES, SMALL_SIZES = tuple(2**power for power in range(16, 31, 2)), (2**16, 2**18)
"""64 KiB to 1 GiB in steps of four."""
TIMEOUT = timedelta(seconds=120)
"""If one operation takes this long, a rank is lost and the others give up."""
LIBRARY = {"cuda": "NCCL", "rocm": "RCCL", "cpu": "gloo"}
FIXED = Effort(warmup_seconds=None, seconds=None)
"""No stopping rule that depends on a rank's own clock: every rank must make the same calls."""


@contextmanager
def process_group() -> Iterator[tuple[Bench, bool]]:
    """Join torchrun's ranks, with a GPU each or over gloo on a CPU; the bench comes with whether this is the first of them."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", distributed.get_node_local_rank())
        torch.cuda.set_device(device)
    distributed.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=TIMEOUT)
    ranks = distributed.get_world_size()
    yield open_bench(device=device, ranks=ranks, gather=gather), distributed.get_rank() == 0
    gc.collect()  # DDP's reducer is part of a reference cycle; with gloo, one that outlives its process group aborts the process
    distributed.barrier()
    distributed.destroy_process_group()


def gather(value: Any) -> list[Any]:
    """Return every rank's value, on every rank."""
    gathered = [value] * distributed.get_world_size()
    distributed.all_gather_object(gathered, value)
    return gathered


def single_tensor_function(operation: str) -> Callable[..., object]:
    """Return the single-tensor form; torch 2.13 renamed it and warns at each call of the old name."""
    names = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    newest: Callable[..., object] = getattr(distributed, f"{operation}_single", None) or getattr(distributed, names[operation])
    return newest


def prepare(operation: str, elements: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    """Allocate a buffer on this rank and return an operation on it as a call; needs a process group."""
    buffer = torch.randn(elements, device=device, dtype=dtype)
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    if operation == "all_reduce":  # an average in place stays finite when repeated; gloo has none and takes the maximum
        average = distributed.ReduceOp.AVG if distributed.get_backend() == "nccl" else distributed.ReduceOp.MAX
        return partial(distributed.all_reduce, buffer, op=average)
    if operation == "all_gather":
        return partial(single_tensor_function(operation), buffer, buffer.chunk(ranks)[0].clone())
    if operation == "reduce_scatter":
        return partial(single_tensor_function(operation), torch.empty_like(buffer.chunk(ranks)[0]), buffer)
    received = torch.empty_like(buffer)
    if operation == "all_to_all":
        return partial(distributed.all_to_all_single, received, buffer)

    def exchange() -> None:
        sending = distributed.P2POp(distributed.isend, buffer, (rank + 1) % ranks)
        receiving = distributed.P2POp(distributed.irecv, received, (rank - 1) % ranks)
        for work in distributed.batch_isend_irecv([sending, receiving]):
            work.wait()

    return exchange


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


def cases(platform: str, ranks: int, *, small: bool) -> list[Case]:
    """Return every operation at every size. `bytes` is the message rounded to a multiple of the ranks."""
    return [
        Case(
            kind=operation,
            variant=LIBRARY[platform],
            shape={"message_bytes": size, "ranks": ranks},
            dtype="fp32",
            bytes=elements * ELEMENT_BYTES,
            prepare=partial(prepare, operation, elements),
            effort=replace(FIXED, repetitions=repetitions, warmup=warmup),
        )
        for operation in OPERATIONS
        for size in (SMALL_SIZES if small else SIZES)
        for elements in (size // ELEMENT_BYTES // ranks * ranks,)
        for repetitions, warmup in ((200, 30) if size <= 2**20 else (50, 10) if size <= 2**26 else (20, 5),)
    ]


OVERLAPPED = ("all_gather", "reduce_scatter")
"""What tensor ranks exchange while they multiply."""
OVERLAPPED_PRODUCT = gemm.Product(m=8192, k=4096, n=14336)
OVERLAPPED_BYTES, SMALL_OVERLAPPED_BYTES = (2**26, 2**28), (2**16,)
OVERLAPPED_PRODUCTS = 2
"""So many in a row take longer than any of the messages."""


def prepare_overlapped(operation: str | None, product: gemm.Product | None, size: int, device: torch.device) -> Call:
    """Return the start of a collective, the products in the meantime, and the wait for it; None leaves either out."""
    elements = size // 2 // distributed.get_world_size() * distributed.get_world_size()
    exchange = prepare(operation, elements, device, torch.bfloat16) if operation else None
    multiply = gemm.prepare(product, "bf16", "F.linear", device) if product else None

    def both() -> None:
        work = exchange(async_op=True) if exchange else None
        for _ in range(OVERLAPPED_PRODUCTS if multiply else 0):
            multiply()  # type: ignore[misc]
        if work:
            work.wait()

    return both


def overlap_cases(ranks: int, *, small: bool) -> list[Case]:
    """Return the products alone, each collective alone, and both at once."""
    product = OVERLAPPED_PRODUCT.shrunk() if small else OVERLAPPED_PRODUCT

    def case(variant: str, operation: str | None, size: int, *, multiplies: bool) -> Case:
        return Case(
            kind="overlapped",
            variant=variant,
            shape={**product.shape, "ranks": ranks} | ({"message_bytes": size} if operation else {}),
            dtype="bf16",
            flop=OVERLAPPED_PRODUCTS * product.flop * ranks if multiplies else None,
            prepare=partial(prepare_overlapped, operation, product if multiplies else None, size),
            effort=replace(FIXED, repetitions=50, warmup=10),
        )

    return [
        case("products", None, 0, multiplies=True),
        *(
            case(f"{operation}{' beside products' * multiplies}", operation, size, multiplies=multiplies)
            for operation in OVERLAPPED
            for size in (SMALL_OVERLAPPED_BYTES if small else OVERLAPPED_BYTES)
            for multiplies in (False, True)
        ),
    ]
