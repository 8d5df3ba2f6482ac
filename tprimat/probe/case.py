"""One operation to time, and how a list of them becomes a list of records: measured or refused, each written as it comes."""

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

from tprimat.probe.device import cache_bytes, default_device, describe_machine, describe_software
from tprimat.probe.gauges import Gauges
from tprimat.probe.timing import Call, Effort, Stopwatch
from tprimat.records.schema import Machine, ProbeRecord
from tprimat.records.store import append_probe, read_probes

REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, ImportError)
"""What torch raises for an operation that a device, a build or the free memory cannot do; out of memory and
what is not implemented are RuntimeErrors."""

LONGEST_ERROR = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation at one size."""

    kind: str
    variant: str | None = None
    shape: dict[str, int]
    dtype: str
    flop: int | None = None
    """In one call."""
    bytes: int | None = None
    """Moved in one call."""
    prepare: Callable[[torch.device], Call]
    """Allocates the operands on the device and gives the call to time."""
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    """Settings that hold while it is prepared and timed, and are restored after."""
    effort: Effort = field(default_factory=Effort)
    otherwise: "Case | None" = None
    """Tried, and recorded as well, where this one is refused."""

    @property
    def title(self) -> str:
        """For progress."""
        return " ".join(
            str(part) for part in (self.kind, self.variant or "", self.dtype, "x".join(map(str, self.shape.values())))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A device, ready to be measured."""

    device: torch.device
    machine: Machine
    software: dict[str, str]
    stopwatch: Stopwatch
    gauges: Gauges
    small: bool
    """Sizes for a processor, which prove that everything runs, and measure little."""


def open_bench(
    *, small: bool | None = None, device: torch.device | None = None, ranks: int = 1, seen: Machine | None = None
) -> Bench:
    """Look at the device and set the clocks up.

    Args:
        small: sizes for a processor; None: where the device is one.
        device: None: the first GPU where there is one.
        ranks: processes that measure together.
        seen: what the vendor's tool says of this machine.
    """
    device = device or default_device()
    gauges = Gauges(device)
    return Bench(
        device=device,
        machine=describe_machine(device, ranks, seen),
        software=describe_software(),
        stopwatch=Stopwatch(device, cache_bytes(device), gauges.start, gauges.look),
        gauges=gauges,
        small=device.type == "cpu" if small is None else small,
    )


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def quick(effort: Effort, small: bool) -> Effort:
    """The same procedure with fewer calls on a processor, where the point is that it runs."""
    return replace(effort, warmup=3, repetitions=20, warmup_seconds=0.05, seconds=0.1) if small else effort


def measure(case: Case, bench: Bench) -> ProbeRecord:
    """Time one case; a refusal becomes the record's error."""
    record = blank(case, bench)
    make_room(case, bench)
    failure = None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            with case.within():
                seconds = bench.stopwatch.measure(case.prepare(bench.device), quick(case.effort, bench.small))
        except REFUSALS as error:
            failure = explain(error, [str(warning.message) for warning in heard])
    if failure:
        gc.collect()  # out here, where the error's frames no longer hold the operands
        return replace(record, error=failure)
    reading = bench.gauges.take()
    return replace(
        record,
        seconds=seconds,
        clock_hertz=reading.clock_hertz,
        power_watts=reading.power_watts,
        peak_allocated_bytes=peak_memory(bench.device),
    )


def blank(case: Case, bench: Bench) -> ProbeRecord:
    """The record before anything was measured."""
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
    """Since make_room; None on a processor."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def make_room(case: Case, bench: Bench) -> None:
    """Give back what the last case held, so that one out-of-memory does not bring the next, nor count in its peak."""
    if not case.effort.flush:  # training steps: large, and models stand in cycles
        bench.stopwatch.release()
        gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)


def tidy(bench: Bench) -> None:
    """Leave the device to other processes."""
    bench.stopwatch.release()
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def explain(error: BaseException, warned: Sequence[str] = ()) -> str:
    """Kind and first line of an error, and the warnings in which torch gives its reasons."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    reasons = dict.fromkeys(text.splitlines()[0].split(" (Triggered internally")[0] for text in warned if text)
    return " | ".join((f"{type(error).__name__}: {lines[0] if lines else ''}", *reasons))[:LONGEST_ERROR]


Identity = tuple[object, ...]


def identity(case: "Case | ProbeRecord", machine: Machine | None = None, software: dict[str, str] | None = None) -> Identity:
    """What makes two measurements the same one: operation, size, dtype, machine and software."""
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
class Notebook:
    """Where records go, and which are there already."""

    file: Path | None
    """probes.jsonl; None keeps nothing."""
    known: dict[Identity, ProbeRecord]
    deadline: float | None = None
    """On time.monotonic: no case is begun after it."""
    tell: Callable[[str], None] = print

    @property
    def late(self) -> bool:
        """Whether the time budget is spent."""
        return self.deadline is not None and time.monotonic() > self.deadline


def open_notebook(file: Path | None, *, resume: bool, seconds: float | None, tell: Callable[[str], None]) -> Notebook:
    """Read what was measured before, where it is to be kept.

    Raises:
        RecordError: the file is damaged.
    """
    known = {identity(record): record for record in read_probes(file)} if file and resume else {}
    deadline = None if seconds is None else time.monotonic() + seconds
    return Notebook(file=file, known=known, deadline=deadline, tell=tell)


def run(cases: Iterable[Case], bench: Bench, notebook: Notebook) -> Iterator[ProbeRecord]:
    """Measure each case that is not known yet, in order, until the time budget is spent; records are written as they come."""
    left = 0
    for case in cases:
        found = notebook.known.get(identity(case, bench.machine, bench.software))
        if found is None and notebook.late:
            left += 1
            continue
        record = found or measure(case, bench)
        if found is None:
            keep(record, notebook)
            notebook.tell(f"{case.title}: {record.error or outcome(record)}")
        yield record
        if record.error and case.otherwise:
            yield from run((case.otherwise,), bench, notebook)
    if left:
        notebook.tell(f"The time budget is spent: {left} cases are left; --resume goes on with them.")


def keep(record: ProbeRecord, notebook: Notebook) -> None:
    """Append one record."""
    if notebook.file:
        append_probe(notebook.file, record)


def outcome(record: ProbeRecord) -> str:
    """One line of progress; the tables compute their own figures."""
    return f"{median(record.seconds) * 1e3:.4g} ms, n = {len(record.seconds)}"
