"""Clock and power of a device while it is measured."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tprimat.probe.device import Gauges, Load, mean, nvml_reader

FAKE_PACKAGES = str(Path(__file__).parent.parent / "fake_packages")
NOTHING = Load(clock_hertz=None, power_watts=None)


@pytest.fixture
def nvml(monkeypatch):
    """Replace pynvml, and return a function that sets the GPUs it reports."""
    monkeypatch.delenv("FAKE_GPUS", raising=False)
    monkeypatch.syspath_prepend(FAKE_PACKAGES)
    real = sys.modules.pop("pynvml", None)
    yield lambda *gpus: monkeypatch.setenv("FAKE_GPUS", json.dumps(gpus))
    sys.modules.pop("pynvml", None)
    if real is not None:
        sys.modules["pynvml"] = real


@pytest.fixture
def gauges(monkeypatch):
    """Gauges that read a GPU with this UUID."""

    def make(uuid):
        read = nvml_reader(uuid)
        monkeypatch.setattr("tprimat.probe.device.reader_of", lambda device: read)
        return Gauges(torch.device("cuda"))

    return make


def test_the_mean_of_the_readings_since_the_start_is_taken_once(nvml, gauges):
    gpu = {"clock_megahertz": 100, "power_milliwatts": 100_000}
    nvml({}, gpu)
    watched = gauges("1")
    watched.look()
    watched.start()
    for clock, power in ((1980, 650_500), (1970, None)):
        nvml({}, {"clock_megahertz": clock, "power_milliwatts": power})
        watched.look()
    assert watched.take() == Load(clock_hertz=1.975e9, power_watts=650.5)
    assert watched.take() == NOTHING


@pytest.mark.parametrize("gpus", [None, [{}]], ids=["no driver", "another GPU"])
def test_where_nothing_can_be_read_nothing_is_claimed(nvml, gauges, gpus):
    if gpus is not None:
        nvml(*gpus)
    watched = gauges("1")
    watched.start()
    watched.look()
    assert watched.take() == NOTHING


def test_a_processor_has_no_gauges():
    watched = Gauges(torch.device("cpu"))
    watched.look()
    assert watched.take() == NOTHING


def test_absent_readings_do_not_pull_a_mean_down():
    assert mean([None, 2.0, 4.0]) == 3.0
    assert mean([None]) is None
