"""Cases that all ranks measure together: the same calls on each, the time of the slowest, written by the first."""

import gc
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

from tprimat.probe import collectives, transformer
from tprimat.probe.case import (
    REFUSALS,
    Bench,
    Case,
    Identity,
    Notebook,
    blank,
    explain,
    identity,
    keep,
    make_room,
    open_bench,
    outcome,
    peak_memory,
    quick,
)
from tprimat.probe.device import default_device, describe_machine, describe_software
from tprimat.probe.timing import Effort
from tprimat.records.schema import Machine, ProbeRecord

T = TypeVar("T")

PATIENCE = timedelta(seconds=120)
"""After this long in one operation a rank is lost, and the others give up."""
LIBRARY = {"cuda": "NCCL", "rocm": "RCCL", "cpu": "gloo"}


@contextmanager
def process_group(small: bool | None, seen: Machine | None) -> Iterator[Bench]:
    """Join the ranks that torchrun started: a GPU each where there are GPUs, else processes that talk through gloo."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", distributed.get_node_local_rank())
        torch.cuda.set_device(device)
    distributed.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=PATIENCE)
    yield open_bench(small=small, device=device, ranks=distributed.get_world_size(), seen=seen)
    gc.collect()  # DDP's reducer stands in a cycle; with gloo, one that outlives its process group aborts the process
    distributed.barrier()
    distributed.destroy_process_group()


def everyones(value: T) -> list[T]:
    """What each rank has, on each rank."""
    gathered: list[T] = [value] * distributed.get_world_size()
    distributed.all_gather_object(gathered, value)
    return gathered


def in_step(effort: Effort, *, small: bool) -> Effort:
    """No stopping rule looks at a rank's own clock, so that every rank makes the same calls."""
    return replace(quick(effort, small), warmup_seconds=None, relative_interval=None, seconds=None)


def measure_together(case: Case, bench: Bench) -> ProbeRecord:
    """Like case.measure, on every rank at once. A refusal on one rank is a refusal on all."""
    record = blank(case, bench)
    make_room(case, bench)
    call, error = None, None
    seconds: tuple[float, ...] = ()
    try:
        call = case.prepare(bench.device)
    except REFUSALS as refusal:
        error = explain(refusal)
    refusals = [found for found in everyones(error) if found]
    if call and not refusals:
        try:
            seconds = bench.stopwatch.measure(call, in_step(case.effort, small=bench.small))
        except REFUSALS as refusal:
            error = explain(refusal)
        refusals = [found for found in everyones(error) if found]
    call = None
    if refusals:
        gc.collect()
        return replace(record, error=refusals[0])
    return completed(record, seconds, bench)


def completed(record: ProbeRecord, seconds: tuple[float, ...], bench: Bench) -> ProbeRecord:
    """With the slowest rank's time of each repetition, the highest peak of memory, and this rank's clock and power."""
    peaks = [peak for peak in everyones(peak_memory(bench.device)) if peak is not None]
    reading = bench.gauges.take()
    return replace(
        record,
        seconds=tuple(max(times) for times in zip(*everyones(seconds), strict=True)),
        clock_hertz=reading.clock_hertz,
        power_watts=reading.power_watts,
        peak_allocated_bytes=max(peaks, default=None),
    )


def run_together(cases: Iterable[Case], bench: Bench, notebook: Notebook) -> Iterator[ProbeRecord]:
    """Measure what the first rank does not know yet; the first rank keeps and tells it."""
    first = distributed.get_rank() == 0
    known = everyones(notebook.known)[0]
    for case in cases:
        if identity(case, bench.machine, bench.software) in known:
            continue
        if everyones(notebook.late)[0]:
            return
        record = measure_together(case, bench)
        if first:
            keep(record, notebook)
            notebook.tell(f"{case.title}: {record.error or outcome(record)}")
        yield record


def together_cases(kind: str, ranks: int, platform: str, *, small: bool) -> list[Case]:
    """Of `collectives` or `ddp`."""
    if kind == "ddp":
        return transformer.ddp_cases(ranks, small=small)
    return collectives.cases(LIBRARY[platform], ranks, small=small)


def cases_here(kind: str, bench: Bench) -> list[Case]:
    """Those of the ranks that torchrun has started."""
    return together_cases(kind, distributed.get_world_size(), bench.machine.platform, small=bench.small)


def all_known(kind: str, ranks: int, known: Container[Identity], *, small: bool | None, seen: Machine | None) -> bool:
    """Whether so many ranks would find everything measured; asked without starting them.

    Args:
        kind: of `collectives` or `ddp`.
        ranks: how many there would be.
        known: what is measured.
        small: as open_bench's.
        seen: what the vendor's tool says of this machine.
    """
    device = default_device()
    machine, software = describe_machine(device, ranks, seen), describe_software()
    small = device.type == "cpu" if small is None else small
    cases = together_cases(kind, ranks, machine.platform, small=small)
    return all(identity(case, machine, software) in known for case in cases)
