"""One timer for every probe: device events on a GPU, a monotonic clock on a CPU, every sample kept.

The procedure is that of Triton's do_bench (triton/testing.py): warm up, overwrite a buffer larger than the last-level cache
before each repetition so that operands come from memory, and take the time between two events around the operation. Writing that
buffer also keeps the device busy while the host enqueues the next call, so that short kernels are not timed at the host's pace.
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
    """Warm-up ends here at the latest, after one call at least; None: never before `warmup` calls."""
    repetitions: int = 200
    at_least: int = 6
    """The fewest samples whose order statistics enclose the median with 95 %."""
    relative_interval: float | None = 0.01
    """Sampling ends when the 95 % interval of the median is narrower than this share of it; None: never before `repetitions`."""
    seconds: float | None = 1.0
    """Sampling ends here at the latest, after `at_least` samples; None: never before `repetitions`."""
    flush: bool = True


ONE_BATCH_SECONDS = 0.05
"""Repetitions are enqueued together for about this long before the stopping rules are looked at."""


FEWEST_TO_SETTLE = 20
"""A handful of repetitions agrees before the device's clock has answered to the load."""


def settled(samples: Sequence[float], effort: Effort) -> bool:
    """Whether the median is known closely enough."""
    if effort.relative_interval is None or len(samples) < FEWEST_TO_SETTLE:
        return False
    interval = median_interval(np.array(samples))
    if interval.low is None or interval.high is None:
        return False
    return interval.high - interval.low < effort.relative_interval * interval.value


def event() -> torch.cuda.Event:
    """A mark on the device's stream that keeps its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Stopwatch:
    """Times calls on one device.

    Args:
        device: "cuda" (which ROCm answers to as well) or "cpu".
        cache_bytes: size of the last-level cache, which twice that many bytes displace.
        before_measuring: called once the device is warm.
        while_busy: called while the device works off a batch, to read its clock and power.
    """

    def __init__(
        self, device: torch.device, cache_bytes: int, before_measuring: Call | None = None, while_busy: Call | None = None
    ) -> None:
        self.device = device
        self.before_measuring = before_measuring
        self.while_busy = while_busy
        self._cache_bytes = cache_bytes
        self._displaced: torch.Tensor | None = None

    def measure(self, call: Call, effort: Effort) -> tuple[float, ...]:
        """Seconds of each repetition of `call`."""
        expected = self._warm_up(call, effort)
        if self.before_measuring:
            self.before_measuring()
        whole = effort.relative_interval is None and effort.seconds is None
        batch = effort.repetitions if whole else max(1, min(25, int(ONE_BATCH_SECONDS / max(expected, 1e-9))))
        samples: list[float] = []
        started = time.perf_counter()
        while len(samples) < effort.repetitions:
            samples += self._sample(call, min(batch, effort.repetitions - len(samples)), flush=effort.flush)
            late = effort.seconds is not None and time.perf_counter() - started > effort.seconds
            if settled(samples, effort) or (late and len(samples) >= effort.at_least):
                break
        return tuple(samples)

    def release(self) -> None:
        """Give the buffer back that displaces the cache."""
        self._displaced = None

    def _warm_up(self, call: Call, effort: Effort) -> float:
        """Call until warm; seconds that one call takes then."""
        started = time.perf_counter()
        expected = self._sample(call, 1, flush=False)[0]
        for done in range(1, max(2, effort.warmup)):
            late = effort.warmup_seconds is not None and time.perf_counter() - started > effort.warmup_seconds
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
            started = time.perf_counter()
            call()
            samples.append(time.perf_counter() - started)
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
