"""Measure a list of operations, and write each result or refusal as a record as soon as there is one.

Every sample is kept, timed with device events on a GPU and a monotonic clock on a CPU. The procedure is that of Triton's do_bench
(triton/testing.py): warm up, overwrite a buffer larger than the last-level cache before each repetition so that operands come
from memory, and take the time between two events around the operation. Writing that buffer also keeps the device busy while the
host enqueues the next call, so that its overhead does not add to short kernels.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from tprimat.core.accelerators import recorded_name
from tprimat.hardware.gpus import NvmlReader
from tprimat.hardware.nodes import this_machine
from tprimat.records.environment import processor_name, software_versions
from tprimat.records.schema import Machine, ProbeRecord, TelemetrySample
from tprimat.records.store import append_probe, read_probes

INFINITY_CACHE_BYTES = 256 * 2**20
"""Memory-side cache of MI300 and MI350 (AMD CDNA 3 white paper, page 4), which torch does not report."""
MIN_GPU_CACHE_BYTES = 128 * 2**20
"""Half of what Triton's do_bench overwrites; never less, so that overwriting it hides the host's launch overhead."""


def visible_gpus() -> int:
    """Return the number of GPUs that torch may use."""
    return torch.cuda.device_count()


def is_rank() -> bool:
    """Return whether torchrun started this process."""
    return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()


def cache_bytes(device: torch.device) -> int:
    """Return the size of a GPU's last-level cache; a processor's is not displaced."""
    if device.type != "cuda":
        return 0
    l2 = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    return max(l2, INFINITY_CACHE_BYTES if torch.version.hip else 0, MIN_GPU_CACHE_BYTES)


def describe_machine(device: torch.device, ranks: int = 1) -> Machine:
    """Describe the hardware as torch names it, and what only its vendor's tool knows: driver and power limit."""
    if device.type != "cuda":
        return Machine(platform="cpu", accelerator=processor_name(), gpus_per_node=ranks, nodes=1)
    nothing = Machine(platform="rocm" if torch.version.hip else "cuda", accelerator=None, gpus_per_node=None, nodes=1)
    name, memory = torch.cuda.get_device_name(device), int(torch.cuda.get_device_properties(device).total_memory)
    return replace(this_machine() or nothing, accelerator=recorded_name(name, memory), gpus_per_node=ranks, memory_bytes=memory)


def describe_software() -> dict[str, str]:
    """Return the versions that decide which kernels run, under the names that runs use, so that both can be compared."""
    versions = {name: version for name, version in software_versions().items() if name in {"torch", "triton"}}
    versions |= {name: str(version) for name, version in (("cuda", torch.version.cuda), ("rocm", torch.version.hip)) if version}
    if torch.cuda.is_available():
        if cudnn := torch.backends.cudnn.version():  # type: ignore[no-untyped-call]
            versions["cudnn"] = str(cudnn)
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return versions


def reader_of(device: torch.device) -> Callable[[], list[TelemetrySample]]:
    """Return a function that reads an NVIDIA GPU through NVML, whatever CUDA_VISIBLE_DEVICES says; of others nothing."""
    with suppress(LookupError):  # NVML does not answer, or does not know the GPU
        if device.type == "cuda" and not torch.version.hip:
            return NvmlReader([f"GPU-{torch.cuda.get_device_properties(device).uuid}"]).read
    return list


Call = Callable[[], object]

BATCH_SECONDS = 0.05
"""Repetitions are enqueued in batches of about this length; the stopping rules are checked between batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long one operation is measured."""

    warmup: int = 30
    warmup_seconds: float | None = 0.3
    """Warm-up ends after this time, but not before one call; None: only after `warmup` calls."""
    repetitions: int = 200
    at_least: int = 6
    """The smallest number of samples whose extremes enclose the median with 95 % probability."""
    seconds: float | None = 1.0
    """Sampling ends after this time, but not before `at_least` samples; None: only after `repetitions`."""
    flush: bool = True
    loaded_seconds: float | None = None
    """Keep the device busy with the call for this long before measuring, so that its clock is that of sustained work."""


SMALL_EFFORT = Effort(warmup=3, warmup_seconds=None, repetitions=20, seconds=None, flush=False)
"""For small sizes, which only prove that everything runs. A processor's cache is not displaced: a server's may hold half a
gigabyte, which takes longer to write than any call here."""


class Stopwatch:
    """Time calls on one device, whose last-level cache has so many bytes; a buffer of twice the size displaces it."""

    def __init__(self, device: torch.device, cache_bytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device = device
        self.clock = clock
        self.readings: list[TelemetrySample] = []
        """Of the GPU while it works on the samples of the last call, once it is warm: they show a throttled measurement."""
        self._read = reader_of(device)
        self._cache_bytes = cache_bytes
        self._displaced: torch.Tensor | None = None

    def measure(self, call: Call, effort: Effort) -> tuple[float, ...]:
        """Return the seconds of each repetition of `call`."""
        expected = self._warm_up(call, effort)
        started = self.clock()
        while effort.loaded_seconds is not None and self.clock() - started < effort.loaded_seconds:
            self._sample(call, max(1, int(BATCH_SECONDS / max(expected, 1e-9))), flush=False)
        self.readings.clear()
        batch = effort.repetitions if effort.seconds is None else max(1, min(25, int(BATCH_SECONDS / max(expected, 1e-9))))
        samples: list[float] = []
        started = self.clock()
        while len(samples) < effort.repetitions:
            samples += self._sample(call, min(batch, effort.repetitions - len(samples)), flush=effort.flush)
            late = effort.seconds is not None and self.clock() - started > effort.seconds
            if late and len(samples) >= effort.at_least:
                break
        return tuple(samples)

    def release(self) -> None:
        """Free the buffer that displaces the cache."""
        self._displaced = None

    def _warm_up(self, call: Call, effort: Effort) -> float:
        """Call until warm, twice at least; return the seconds of the last call."""
        started, expected = self.clock(), 0.0
        for done in range(max(2, effort.warmup)):
            if done > 1 and effort.warmup_seconds is not None and self.clock() - started > effort.warmup_seconds:
                break
            expected = self._sample(call, 1, flush=False)[0]
        return expected

    def _sample(self, call: Call, count: int, *, flush: bool) -> list[float]:
        if self.device.type == "cuda":
            return self._sample_with_events(call, count, flush)
        samples = []
        for _ in range(count):
            if flush:
                self._displace_cache()
            started = self.clock()
            call()
            samples.append(self.clock() - started)
        return samples

    def _sample_with_events(self, call: Call, count: int, flush: bool) -> list[float]:
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]  # type: ignore[no-untyped-call]
        pairs = list(zip(events[::2], events[1::2], strict=True))
        for start, end in pairs:
            if flush:
                self._displace_cache()
            start.record()
            call()
            end.record()
        self.readings += self._read()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def _displace_cache(self) -> None:
        if self._displaced is None:
            self._displaced = torch.empty(2 * self._cache_bytes, dtype=torch.int8, device=self.device)
        self._displaced.zero_()


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
    bytes: int | None = None
    """Moved by one call."""
    prepare: Callable[[torch.device], Call]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Settings in effect while the case is prepared and timed."""
    effort: Effort = field(default_factory=Effort)

    @property
    def title(self) -> str:
        """Name for progress messages."""
        sizes = ", ".join(f"{name} {size:,}" for name, size in self.shape.items())
        return " ".join(part for part in (self.kind, self.variant, self.dtype, sizes) if part)


Gather = Callable[[Any], list[Any]]


def alone(value: Any) -> list[Any]:
    """Return what `gather` of several ranks returns, for a process on its own."""
    return [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A device that is ready to be measured, or one rank's device of several that are measured at once."""

    device: torch.device
    machine: Machine
    software: dict[str, str]
    stopwatch: Stopwatch
    small: bool
    """Use sizes for a processor, which prove that everything runs and measure little."""
    gather: Gather = alone


def open_bench(*, device: torch.device | None = None, ranks: int = 1, gather: Gather = alone) -> Bench:
    """Describe a device, by default the first GPU if there is one, and set up its timer."""
    device = device or (torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    return Bench(
        device=device,
        machine=describe_machine(device, ranks),
        software=describe_software(),
        stopwatch=Stopwatch(device, cache_bytes(device)),
        small=device.type == "cpu",
        gather=gather,
    )


def measure(case: Case, bench: Bench) -> ProbeRecord:
    """Time one case, on all ranks of the bench at once; a refusal, of any rank, becomes the record's error.

    The record has the slowest rank's time of each repetition, the highest memory peak, and this rank's clock and power.
    """
    record = empty_record(case, bench)
    # Free what the last case held, so that one out-of-memory error does not cause the next, nor count in its peak.
    if not case.effort.flush:  # training steps: large models that are part of reference cycles
        bench.stopwatch.release()
        gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
    errors: list[str] = []
    with ExitStack() as settings:

        def prepare(_: Any) -> Call:
            settings.enter_context(case.context())
            return case.prepare(bench.device)

        def sample(call: Call) -> tuple[float, ...]:
            return bench.stopwatch.measure(call, SMALL_EFFORT if bench.small else case.effort)

        result: Any = None
        for part in (prepare, sample):
            error = None
            try:
                result = part(result)
            except REFUSALS as refusal:
                first = next((line for line in str(refusal).splitlines() if line.strip()), "")
                error, result = f"{type(refusal).__name__}: {first}"[:MAX_ERROR_CHARACTERS], None
            if errors := [one for one in bench.gather(error) if one]:
                break
    if errors:
        result = None
        gc.collect()  # here the error's frames no longer hold the operands
        return replace(record, error=errors[0])
    clock = [one.clock_hertz for one in bench.stopwatch.readings if one.clock_hertz is not None]
    power = [one.power_watts for one in bench.stopwatch.readings if one.power_watts is not None]
    peak = torch.cuda.max_memory_allocated(bench.device) if bench.device.type == "cuda" else None
    return replace(
        record,
        seconds=tuple(max(times) for times in zip(*bench.gather(result), strict=True)),
        clock_hertz=fmean(clock) if clock else None,
        power_watts=fmean(power) if power else None,
        peak_allocated_bytes=max((one for one in bench.gather(peak) if one is not None), default=None),
    )


def empty_record(case: Case, bench: Bench) -> ProbeRecord:
    """Return the record of a case without a measurement."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    alike = {name: getattr(case, name) for name in ("kind", "variant", "shape", "dtype", "flop", "bytes")}
    alike |= {name: getattr(bench, name) for name in ("machine", "software", "small")}
    return ProbeRecord(seconds=(), started_at=now, **alike)


Identity = tuple[object, ...]


def identity(record: ProbeRecord) -> Identity:
    """Return what two repetitions of a measurement share: operation, size, dtype, machine and software."""
    shape, software = (tuple(sorted(several.items())) for several in (record.shape, record.software))
    return (record.kind, record.variant, shape, record.dtype, record.machine, software)


class ProbeLog:
    """Where records are written (None: nowhere), and which exist already, if they are not to be measured again."""

    def __init__(self, file: Path | None, *, resume: bool = False, tell: Callable[[str], None] = lambda _: None) -> None:
        """Read what was measured before if `resume`. Raises RecordError: the file is damaged."""
        self.file, self.tell = file, tell
        self.known: dict[Identity, ProbeRecord] = {identity(one): one for one in read_probes(file)} if file and resume else {}


def run(cases: Sequence[Case], bench: Bench, log: ProbeLog) -> Iterator[ProbeRecord]:
    """Measure the cases in order, except known ones; write each record at once. Of several ranks, the first one's log decides."""
    known: dict[Identity, ProbeRecord] = bench.gather(log.known)[0]
    for number, case in enumerate(cases, 1):
        record = known.get(identity(empty_record(case, bench)))
        if record is None:
            record = measure(case, bench)
            if log.file:
                append_probe(log.file, record)
            said = record.error or f"{median(record.seconds) * 1e3:.4g} ms, n = {len(record.seconds)}"
            log.tell(f"{number}/{len(cases)} {case.title}: {said}")
        yield record
