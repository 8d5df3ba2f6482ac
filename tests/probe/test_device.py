"""Clock and power of a device while it is measured."""

import json
from types import SimpleNamespace

import pytest
import torch
from commands import fake_nvml

from tprimat.probe.case import Gauges


def gauges(monkeypatch, uuid):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    return Gauges(torch.device("cuda"))


def test_the_mean_of_the_readings_since_the_start_is_taken_once(monkeypatch):
    with fake_nvml():
        gpu = {"clock_megahertz": 100, "power_milliwatts": 100_000}
        monkeypatch.setenv("FAKE_GPUS", json.dumps([{}, gpu]))
        watched = gauges(monkeypatch, "1")
        watched.look()
        watched.start()
        for clock, power in ((1980, 650_500), (1970, None)):
            monkeypatch.setenv("FAKE_GPUS", json.dumps([{}, {"clock_megahertz": clock, "power_milliwatts": power}]))
            watched.look()
    assert watched.take() == (1.975e9, 650.5)
    assert watched.take() == (None, None)


@pytest.mark.parametrize("gpus", [None, [{}]], ids=["no driver", "another GPU"])
def test_where_nothing_can_be_read_nothing_is_claimed(monkeypatch, gpus):
    with fake_nvml():
        monkeypatch.setenv("FAKE_GPUS", json.dumps(gpus)) if gpus else monkeypatch.delenv("FAKE_GPUS", raising=False)
        for watched in (gauges(monkeypatch, "1"), Gauges(torch.device("cpu"))):
            watched.look()
            assert watched.take() == (None, None)
