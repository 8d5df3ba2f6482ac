"""The one timer of every probe, on a processor."""

import time

import pytest
import torch

from tprimat.probe.case import Effort, Stopwatch

CPU = torch.device("cpu")


class Clock:
    """A clock that only moves when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


def test_a_sample_is_the_time_of_the_call_alone(monkeypatch):
    clock = Clock()
    watch = Stopwatch(CPU, cache_bytes=2**10, clock=clock)
    monkeypatch.setattr(torch.Tensor, "zero_", lambda buffer: clock.spend(0.5))
    samples = watch.measure(lambda: clock.spend(2e-3), Effort(warmup=2, repetitions=10, seconds=None))
    assert samples == pytest.approx([2e-3] * 10)
    assert clock.now == pytest.approx(12 * 2e-3 + 10 * 0.5), "the cache is overwritten before each repetition"
    began = time.perf_counter()
    (sample,) = Stopwatch(CPU, cache_bytes=1024).measure(lambda: time.sleep(2e-3), Effort(warmup=1, repetitions=1))
    assert 2e-3 <= sample <= time.perf_counter() - began


def test_a_slow_call_is_cut_short_but_keeps_enough_samples_for_an_interval():
    effort = Effort(warmup=30, warmup_seconds=0.01, repetitions=200, seconds=0.01)
    clock = Clock()
    samples = Stopwatch(CPU, cache_bytes=1024, clock=clock).measure(lambda: clock.spend(5e-3), effort)
    assert len(samples) == 10, "one batch of 50 ms"
    slow = Stopwatch(CPU, cache_bytes=1024, clock=clock).measure(lambda: clock.spend(60.0), effort)
    assert len(slow) == 6


def test_sustained_load_keeps_the_device_busy_before_the_first_sample():
    clock = Clock()
    watch = Stopwatch(CPU, cache_bytes=64, clock=clock)
    assert len(watch.measure(lambda: clock.spend(0.01), Effort(warmup=2, repetitions=10, loaded_seconds=3.0))) == 10
    assert clock.now == pytest.approx(3.0 + 12 * 0.01, abs=0.06)
