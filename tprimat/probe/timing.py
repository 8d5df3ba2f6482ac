"""Time a call repeatedly: with device events on a GPU, with a monotonic clock on a CPU; every sample is kept.

The procedure is that of Triton's do_bench (triton/testing.py): warm up, overwrite a buffer larger than the last-level cache
before each repetition so that operands come from memory, and take the time between two events around the operation. Writing that
buffer also keeps the device busy while the host enqueues the next call, so that its overhead does not add to short kernels.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tprimat.statistics import median_interval

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long one operation is measured."""

    warmup: int = 30
    warmup_seconds: float | None = 0.3
    """Warm-up ends after this time, but not before one call; None: only after `warmup` calls."""
    repetitions: int = 200
    at_least: int = 6
    """The smallest number of samples whose extremes enclose the median with 95 % probability."""
    relative_interval: float | None = 0.01
    """Sampling ends when the median's 95 % interval is narrower than this fraction of it; None: only after `repetitions`."""
    seconds: float | None = 1.0
    """Sampling ends after this time, but not before `at_least` samples; None: only after `repetitions`."""
    flush: bool = True
    """Overwrite the cache before each repetition."""


BATCH_SECONDS = 0.05
"""Repetitions are enqueued in batches of about this length; the stopping rules are checked between batches."""


MIN_SAMPLES_TO_SETTLE = 20
"""A handful of repetitions may agree before the device has adapted its clock to the load."""


def settled(samples: Sequence[float], effort: Effort) -> bool:
    """Return whether the median is known precisely enough."""
    if effort.relative_interval is None or len(samples) < MIN_SAMPLES_TO_SETTLE:
        return False
    interval = median_interval(np.array(samples))
    if interval.low is None or interval.high is None:
        return False
    return interval.high - interval.low < effort.relative_interval * interval.value


def event() -> torch.cuda.Event:
    """Create an event that records its time on the device's stream."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Stopwatch:
    """Time calls on one device.

    Args:
        device: "cuda", which also means ROCm, or "cpu".
        cache_bytes: size of the last-level cache; a buffer of twice the size displaces it.
        before_measuring: called once the device is warm.
        while_busy: called while a GPU works on a batch, to read its clock and power.
        clock: seconds, for the warm-up, the stopping rules and calls on a CPU.
    """

    def __init__(
        self,
        device: torch.device,
        cache_bytes: int,
        before_measuring: Call | None = None,
        while_busy: Call | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device = device
        self.clock = clock
        self.before_measuring = before_measuring
        self.while_busy = while_busy
        self._cache_bytes = cache_bytes
        self._displaced: torch.Tensor | None = None

    def measure(self, call: Call, effort: Effort) -> tuple[float, ...]:
        """Return the seconds of each repetition of `call`."""
        expected = self._warm_up(call, effort)
        if self.before_measuring:
            self.before_measuring()
        fixed = effort.relative_interval is None and effort.seconds is None
        batch = effort.repetitions if fixed else max(1, min(25, int(BATCH_SECONDS / max(expected, 1e-9))))
        samples: list[float] = []
        started = self.clock()
        while len(samples) < effort.repetitions:
            samples += self._sample(call, min(batch, effort.repetitions - len(samples)), flush=effort.flush)
            late = effort.seconds is not None and self.clock() - started > effort.seconds
            if settled(samples, effort) or (late and len(samples) >= effort.at_least):
                break
        return tuple(samples)

    def release(self) -> None:
        """Free the buffer that displaces the cache."""
        self._displaced = None

    def _warm_up(self, call: Call, effort: Effort) -> float:
        """Call until warm; return the seconds of the last call."""
        started = self.clock()
        expected = self._sample(call, 1, flush=False)[0]
        for done in range(1, max(2, effort.warmup)):
            late = effort.warmup_seconds is not None and self.clock() - started > effort.warmup_seconds
            if done > 1 and late:
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
        pairs = [(event(), event()) for _ in range(count)]
        for start, end in pairs:
            if flush:
                self._displace_cache()
            start.record()
            call()
            end.record()
        if self.while_busy:
            self.while_busy()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def _displace_cache(self) -> None:
        if self._displaced is None:
            self._displaced = torch.empty(2 * self._cache_bytes, dtype=torch.int8, device=self.device)
        self._displaced.zero_()
