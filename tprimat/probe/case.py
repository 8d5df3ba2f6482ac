"""Measure a list of operations, and write each result or refusal as a record as soon as there is one."""

import gc
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import torch

from tprimat.probe.device import Gauges, cache_bytes, default_device, describe_machine, describe_software
from tprimat.probe.timing import Call, Effort, Stopwatch
from tprimat.records.schema import Machine, ProbeRecord
from tprimat.records.store import append_probe, read_probes

REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, ImportError)
"""What torch raises for an operation that a device, a build or the free memory does not allow. Out-of-memory and
not-implemented errors are RuntimeErrors."""
MAX_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation at one size."""

    kind: str
    variant: str | None = None
    shape: dict[str, int]
    dtype: str
    flop: int | None = None
    """Of one call."""
    bytes: int | None = None
    """Moved by one call."""
    prepare: Callable[[torch.device], Call]
    """Allocates the operands on the device and returns the call to time."""
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Settings in effect while the case is prepared and timed."""
    effort: Effort = field(default_factory=Effort)
    fallback: "Case | None" = None
    """Measured as well if this case is refused."""

    @property
    def title(self) -> str:
        """Name for progress messages."""
        return " ".join(
            str(part) for part in (self.kind, self.variant or "", self.dtype, "x".join(map(str, self.shape.values())))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A device that is ready to be measured."""

    device: torch.device
    machine: Machine
    software: dict[str, str]
    stopwatch: Stopwatch
    gauges: Gauges
    small: bool
    """Use sizes for a processor, which prove that everything runs and measure little."""


def open_bench(
    *, small: bool | None = None, device: torch.device | None = None, ranks: int = 1, detected: Machine | None = None
) -> Bench:
    """Describe the device and set up its timer.

    Args:
        small: use sizes for a processor; None: if the device is one.
        device: None: the first GPU if there is one.
        ranks: processes that measure together.
        detected: this machine as its vendor's tool describes it.
    """
    device = device or default_device()
    gauges = Gauges(device)
    return Bench(
        device=device,
        machine=describe_machine(device, ranks, detected),
        software=describe_software(),
        stopwatch=Stopwatch(device, cache_bytes(device), gauges.start, gauges.look),
        gauges=gauges,
        small=device.type == "cpu" if small is None else small,
    )


def now() -> str:
    """Return the time in ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def reduced(effort: Effort, small: bool) -> Effort:
    """Return the effort with fewer calls for small sizes, which only prove that everything runs."""
    return replace(effort, warmup=3, repetitions=20, warmup_seconds=0.05, seconds=0.1) if small else effort


def measure(case: Case, bench: Bench) -> ProbeRecord:
    """Time one case; a refusal becomes the record's error."""
    record = empty_record(case, bench)
    free_memory(case, bench)
    failure = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with case.context():
                seconds = bench.stopwatch.measure(case.prepare(bench.device), reduced(case.effort, bench.small))
        except REFUSALS as error:
            failure = explain(error, [str(warning.message) for warning in caught])
    if failure:
        gc.collect()  # here the error's frames no longer hold the operands
        return replace(record, error=failure)
    load = bench.gauges.take()
    return replace(
        record,
        seconds=seconds,
        clock_hertz=load.clock_hertz,
        power_watts=load.power_watts,
        peak_allocated_bytes=peak_memory(bench.device),
    )


def empty_record(case: Case, bench: Bench) -> ProbeRecord:
    """Return the record of a case without a measurement."""
    return ProbeRecord(
        kind=case.kind,
        variant=case.variant,
        shape=case.shape,
        dtype=case.dtype,
        seconds=(),
        flop=case.flop,
        bytes=case.bytes,
        machine=bench.machine,
        software=bench.software,
        started_at=now(),
    )


def peak_memory(device: torch.device) -> int | None:
    """Return the peak of allocated bytes since free_memory; None on a processor."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def free_memory(case: Case, bench: Bench) -> None:
    """Free what the last case held, so that one out-of-memory error does not cause the next, nor count in its peak."""
    if not case.effort.flush:  # training steps: large models that are part of reference cycles
        bench.stopwatch.release()
        gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)


def release(bench: Bench) -> None:
    """Leave the device's memory to other processes."""
    bench.stopwatch.release()
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def explain(error: BaseException, warned: Sequence[str] = ()) -> str:
    """Return the type and first line of an error, and the warnings in which torch gives its reasons."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    reasons = dict.fromkeys(text.splitlines()[0].split(" (Triggered internally")[0] for text in warned if text)
    return " | ".join((f"{type(error).__name__}: {lines[0] if lines else ''}", *reasons))[:MAX_ERROR_CHARACTERS]


Identity = tuple[object, ...]


def identity(case: "Case | ProbeRecord", machine: Machine | None = None, software: dict[str, str] | None = None) -> Identity:
    """Return what two repetitions of a measurement share: operation, size, dtype, machine and software."""
    if isinstance(case, ProbeRecord):
        machine, software = case.machine, case.software
    return (
        case.kind,
        case.variant,
        tuple(sorted(case.shape.items())),
        case.dtype,
        machine,
        tuple(sorted((software or {}).items())),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLog:
    """Where records are written, and which exist already."""

    file: Path | None
    """probes.jsonl; None writes nothing."""
    known: dict[Identity, ProbeRecord]
    deadline: float | None = None
    """On time.monotonic: no case starts after it."""
    tell: Callable[[str], None] = print

    @property
    def out_of_time(self) -> bool:
        """Whether the time budget is spent."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def write(self, record: ProbeRecord) -> None:
        """Append one record."""
        if self.file:
            append_probe(self.file, record)


def open_log(file: Path | None, *, resume: bool, seconds: float | None, tell: Callable[[str], None]) -> ProbeLog:
    """Read what was measured before if `resume`, and set a time budget.

    Raises:
        RecordError: the file is damaged.
    """
    known = {identity(record): record for record in read_probes(file)} if file and resume else {}
    deadline = None if seconds is None else time.monotonic() + seconds
    return ProbeLog(file=file, known=known, deadline=deadline, tell=tell)


def run(cases: Iterable[Case], bench: Bench, log: ProbeLog) -> Iterator[ProbeRecord]:
    """Measure the cases in order, except known ones, until the time budget is spent; write each record at once."""
    remaining = 0
    for case in cases:
        found = log.known.get(identity(case, bench.machine, bench.software))
        if found is None and log.out_of_time:
            remaining += 1
            continue
        record = found or measure(case, bench)
        if found is None:
            log.write(record)
            log.tell(f"{case.title}: {record.error or summary(record)}")
        yield record
        if record.error and case.fallback:
            yield from run((case.fallback,), bench, log)
    if remaining:
        log.tell(f"The time budget is spent: {remaining} cases are left; --resume continues with them.")


def summary(record: ProbeRecord) -> str:
    """Return one line of progress."""
    return f"{median(record.seconds) * 1e3:.4g} ms, n = {len(record.seconds)}"
