"""Clock and power of a device while it is measured."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from commands import fake_nvml

from tprimat.probe.case import measure, open_bench, reader_of
from tprimat.probe.gemm import Product, case_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def reader(monkeypatch, uuid):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    return reader_of(GPU)


def test_a_record_has_the_mean_of_the_readings_during_its_own_samples(monkeypatch):
    bench = open_bench(device=CPU)
    with fake_nvml():
        monkeypatch.setenv("FAKE_GPUS", json.dumps([{}, {"clock_megahertz": 100, "power_milliwatts": 100_000}]))
        read = reader(monkeypatch, "1")
        bench.stopwatch.readings += read()  # of an earlier call
        readings = iter([(1980, 650_500), (1970, None)])

        def sample(call, count, *, flush):
            clock, power = next(readings, (None, None))
            monkeypatch.setenv("FAKE_GPUS", json.dumps([{}, {"clock_megahertz": clock, "power_milliwatts": power}]))
            bench.stopwatch.readings += read()
            return [1e-3] * count

        monkeypatch.setattr(bench.stopwatch, "_warm_up", lambda call, effort: 1e-3)
        monkeypatch.setattr(bench.stopwatch, "_sample", sample)
        case = case_of(Product(16, 16, 16), "bf16", "torch.matmul")
        record = measure(replace(case, effort=replace(case.effort, repetitions=40)), replace(bench, small=False))
    assert (record.clock_hertz, record.power_watts) == (1.975e9, 650.5)
    assert measure(case, bench).clock_hertz is None


@pytest.mark.parametrize("gpus", [None, [{}]], ids=["no driver", "another GPU"])
def test_where_nothing_can_be_read_nothing_is_claimed(monkeypatch, gpus):
    with fake_nvml():
        monkeypatch.setenv("FAKE_GPUS", json.dumps(gpus)) if gpus else monkeypatch.delenv("FAKE_GPUS", raising=False)
        assert not reader(monkeypatch, "1")()
        assert not reader_of(CPU)()
