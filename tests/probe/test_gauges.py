"""Clock and power beside a measurement, from a tool that prints lines."""

import sys
import time

import pytest
import torch

from tprimat.probe.gauges import Gauges, Reading, mean

TOOL = "import signal; print('1980, 650.5'); print('1970, [N/A]'); print('Field \"x\" is not valid'); signal.pause()"


@pytest.fixture
def gauges():
    made = Gauges(torch.device("cpu"))
    yield made
    made.close()


def test_a_tool_that_does_not_flush_is_read_while_it_runs(gauges):
    gauges.follow([sys.executable, "-c", TOOL])
    deadline = time.monotonic() + 30
    readings = []
    while len(readings) < 2 and time.monotonic() < deadline:
        reading = gauges.take()
        readings += [reading] if reading.clock_hertz else []
        if reading.clock_hertz == 1975e6:  # both lines at once
            break
    assert sum(reading.clock_hertz for reading in readings) / len(readings) == 1975e6
    assert [reading.power_watts for reading in readings if reading.power_watts] == [650.5]


def test_where_nothing_can_be_read_nothing_is_claimed(gauges):
    gauges.follow(["no-such-tool-anywhere"])
    gauges.start()
    gauges.look()
    assert gauges.take() == Reading(clock_hertz=None, power_watts=None)


def test_absent_readings_do_not_pull_a_mean_down():
    assert mean([None, 2.0, 4.0]) == 3.0
    assert mean([None]) is None
