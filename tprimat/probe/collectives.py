"""Collective operations over the ranks of one machine, from 64 KiB to 1 GiB; and how any case is measured on all ranks at once.

The message size is nccl-tests' size (doc/PERFORMANCE.md): the whole buffer of a rank on the larger side, so the output of
all-gather and the input of reduce-scatter. Send-recv passes a message round a ring, each rank sending and receiving. A sample is
the time on the slowest rank. analyze/probes.py derives bandwidths from the records.
"""

import gc
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
from torch import distributed

from tprimat.core.effort import Effort, reduced
from tprimat.probe import pieces, transformer
from tprimat.probe.case import (
    REFUSALS,
    Bench,
    Call,
    Case,
    Identity,
    ProbeLog,
    empty_record,
    explain,
    free_memory,
    identity,
    open_bench,
    peak_memory,
    summary,
)
from tprimat.probe.device import default_device, describe_machine, describe_software
from tprimat.records.schema import Machine, ProbeRecord

T = TypeVar("T")

DTYPE = "fp32"
ELEMENT_BYTES = 4
SIZES = tuple(2**power for power in range(16, 31, 2))
"""64 KiB to 1 GiB in steps of four."""
SMALL_SIZES = (2**16, 2**18)
TIMEOUT = timedelta(seconds=120)
"""If one operation takes this long, a rank is lost and the others give up."""
LIBRARY = {"cuda": "NCCL", "rocm": "RCCL", "cpu": "gloo"}


def effort(size: int) -> Effort:
    """Return a fixed number of calls, since every rank must make the same."""
    repetitions, warmup = (200, 30) if size <= 2**20 else (50, 10) if size <= 2**26 else (20, 5)
    return Effort(warmup=warmup, repetitions=repetitions, warmup_seconds=None, relative_interval=None, seconds=None)


def single_tensor_function(operation: str) -> Callable[..., object]:
    """Return the single-tensor form; torch 2.13 renamed it and warns at each call of the old name."""
    names = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    found: Callable[..., object] = getattr(distributed, f"{operation}_single", None) or getattr(distributed, names[operation])
    return found


def all_reduce(buffer: torch.Tensor, ranks: int) -> Call:
    """Average in place: unlike a sum it stays finite when repeated. Gloo has no average and takes the maximum."""
    averages = distributed.get_backend() == "nccl"
    return partial(distributed.all_reduce, buffer, op=distributed.ReduceOp.AVG if averages else distributed.ReduceOp.MAX)


def all_gather(buffer: torch.Tensor, ranks: int) -> Call:
    """Gather every rank's part on every rank."""
    return partial(single_tensor_function("all_gather"), buffer, buffer.chunk(ranks)[0].clone())


def reduce_scatter(buffer: torch.Tensor, ranks: int) -> Call:
    """Sum all ranks' buffers, one part on each rank."""
    return partial(single_tensor_function("reduce_scatter"), torch.empty_like(buffer.chunk(ranks)[0]), buffer)


def all_to_all(buffer: torch.Tensor, ranks: int) -> Call:
    """Exchange a part of every rank's buffer with each rank."""
    return partial(distributed.all_to_all_single, torch.empty_like(buffer), buffer)


def send_recv(buffer: torch.Tensor, ranks: int) -> Call:
    """Send to the next rank of a ring and receive from the previous one."""
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
OVERLAPPED = ("all_gather", "reduce_scatter")
"""What tensor ranks exchange while they multiply."""


def prepare(operation: str, size: int, device: torch.device) -> Call:
    """Allocate a buffer on this rank and return the operation as a call; needs a process group."""
    ranks = distributed.get_world_size()
    elements = size // ELEMENT_BYTES // ranks * ranks
    return OPERATIONS[operation](torch.randn(elements, device=device), ranks)


def cases(backend: str, ranks: int, *, small: bool) -> list[Case]:
    """Return every operation at every size. `bytes` is the message rounded to a multiple of the ranks."""
    return [
        Case(
            kind=operation,
            variant=backend,
            shape={"message_bytes": size, "ranks": ranks},
            dtype=DTYPE,
            bytes=size // ELEMENT_BYTES // ranks * ranks * ELEMENT_BYTES,
            prepare=partial(prepare, operation, size),
            effort=effort(size),
        )
        for operation in OPERATIONS
        for size in (SMALL_SIZES if small else SIZES)
    ]


def cases_on_ranks(kind: str, ranks: int, platform: str, *, small: bool) -> list[Case]:
    """Return the cases of `collectives`, `ddp` or `overlap`."""
    if kind == "ddp":
        return transformer.ddp_cases(ranks, small=small)
    if kind == "overlap":
        operations = {name: OPERATIONS[name] for name in OVERLAPPED}
        return pieces.overlap_cases(ranks, operations, small=small)
    return cases(LIBRARY[platform], ranks, small=small)


def all_measured(kind: str, ranks: int, known: Container[Identity], *, small: bool | None, detected: Machine | None) -> bool:
    """Return whether every case of a probe on several ranks is known, without starting the ranks."""
    device = default_device()
    machine, software = describe_machine(device, ranks, detected), describe_software()
    small = device.type == "cpu" if small is None else small
    every = cases_on_ranks(kind, ranks, machine.platform, small=small)
    return all(identity(case, machine, software) in known for case in every)


@contextmanager
def process_group(small: bool | None, detected: Machine | None) -> Iterator[Bench]:
    """Join the ranks that torchrun started: with one GPU each if there are GPUs, else as processes that communicate with gloo."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", distributed.get_node_local_rank())
        torch.cuda.set_device(device)
    distributed.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=TIMEOUT)
    yield open_bench(small=small, device=device, ranks=distributed.get_world_size(), detected=detected)
    gc.collect()  # DDP's reducer is part of a reference cycle; with gloo, one that outlives its process group aborts the process
    distributed.barrier()
    distributed.destroy_process_group()


def gather(value: T) -> list[T]:
    """Return every rank's value, on every rank."""
    gathered: list[T] = [value] * distributed.get_world_size()
    distributed.all_gather_object(gathered, value)
    return gathered


def fixed_calls(effort: Effort, *, small: bool) -> Effort:
    """Drop all stopping rules that depend on a rank's own clock, so that every rank makes the same calls."""
    return replace(reduced(effort, small), warmup_seconds=None, relative_interval=None, seconds=None)


def measure_on_all_ranks(case: Case, bench: Bench) -> ProbeRecord:
    """Time one case on every rank at once; a refusal on one rank is a refusal on all.

    The record has the slowest rank's time of each repetition, the highest memory peak, and this rank's clock and power.
    """
    record = empty_record(case, bench)
    free_memory(case, bench)
    call, error = None, None
    seconds: tuple[float, ...] = ()
    try:
        call = case.prepare(bench.device)
    except REFUSALS as refusal:
        error = explain(refusal)
    refusals = [found for found in gather(error) if found]
    if call and not refusals:
        try:
            seconds = bench.stopwatch.measure(call, fixed_calls(case.effort, small=bench.small))
        except REFUSALS as refusal:
            error = explain(refusal)
        refusals = [found for found in gather(error) if found]
    call = None
    if refusals:
        gc.collect()
        return replace(record, error=refusals[0])
    peaks = [peak for peak in gather(peak_memory(bench.device)) if peak is not None]
    load = bench.gauges.take()
    return replace(
        record,
        seconds=tuple(max(times) for times in zip(*gather(seconds), strict=True)),
        clock_hertz=load.clock_hertz,
        power_watts=load.power_watts,
        peak_allocated_bytes=max(peaks, default=None),
    )


def run_on_all_ranks(kind: str, bench: Bench, log: ProbeLog) -> None:
    """Measure what the first rank does not know yet of `collectives`, `ddp` or `overlap`; the first rank writes it."""
    first = distributed.get_rank() == 0
    known = gather(log.known)[0]
    for case in cases_on_ranks(kind, distributed.get_world_size(), bench.machine.platform, small=bench.small):
        if identity(case, bench.machine, bench.software) in known:
            continue
        if gather(log.out_of_time)[0]:
            return
        record = measure_on_all_ranks(case, bench)
        if first:
            log.write(record)
            log.tell(f"{case.title}: {record.error or summary(record)}")
