"""When each step ended, on the device's own clock: events on a GPU, so that measuring stops nothing; host time on a CPU."""

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Mark:
    """One moment on a device's stream."""

    event: Any
    """torch.cuda.Event, or None on a CPU."""
    host_seconds: float

    def wait(self) -> None:
        """Block this thread until the device has passed the moment."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: "Mark") -> float:
        """Device time between two moments that have both passed."""
        if self.event is None:
            return self.host_seconds - earlier.host_seconds
        return float(earlier.event.elapsed_time(self.event)) / 1e3


def mark(device: torch.device) -> Mark:
    """Note this moment in the device's work queue, without waiting for it."""
    if device.type != "cuda":
        return Mark(None, time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return Mark(event, time.perf_counter())


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes on this rank since the last reading."""

    allocated: int
    reserved: int


def read_peak_memory(device: torch.device) -> PeakMemory | None:
    """Read torch's allocator counters and start them anew: host-side numbers, the device is not asked. None on a CPU."""
    if device.type != "cuda":
        return None
    peak = PeakMemory(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    torch.cuda.reset_peak_memory_stats(device)
    return peak
