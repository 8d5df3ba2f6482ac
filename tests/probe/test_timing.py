"""The one timer of every probe, on a processor."""

import time

import torch

from tprimat.probe.timing import Effort, Stopwatch, settled

CPU = torch.device("cpu")


def test_sampling_ends_when_the_median_is_known_to_one_percent():
    steady = [1.0, 1.001, 0.999, 1.0, 1.002] * 4
    assert settled(steady, Effort())
    assert not settled([0.99, 1.01] * 10, Effort())
    assert not settled(steady[:19], Effort())
    assert not settled(steady, Effort(relative_interval=None))


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_a_sample_is_the_time_of_the_call_alone():
    watch = Stopwatch(CPU, cache_bytes=2**27)
    started = time.perf_counter()
    samples = watch.measure(lambda: spin(2e-3), Effort(warmup=2, repetitions=10))
    whole = time.perf_counter() - started
    assert all(sample >= 2e-3 for sample in samples)
    assert sum(samples) < 0.8 * whole, "overwriting 256 MiB before each call is not part of it"


def test_without_stopping_rules_every_rank_makes_the_same_number_of_calls():
    calls = []
    effort = Effort(warmup=4, warmup_seconds=None, repetitions=7, relative_interval=None, seconds=None)
    assert len(Stopwatch(CPU, cache_bytes=1024).measure(lambda: calls.append(1), effort)) == 7
    assert len(calls) == 4 + 7


def test_a_slow_call_is_cut_short_but_keeps_enough_samples_for_an_interval():
    effort = Effort(warmup=30, warmup_seconds=0.01, repetitions=200, seconds=0.01, relative_interval=None)
    assert 6 <= len(Stopwatch(CPU, cache_bytes=1024).measure(lambda: spin(5e-3), effort)) <= 10


def test_gauges_start_when_the_device_is_warm():
    seen = []
    watch = Stopwatch(CPU, 1024, before_measuring=lambda: seen.append("start"))
    watch.measure(lambda: seen.append("call"), Effort(warmup=2, repetitions=1))
    assert seen == ["call", "call", "start", "call"]
