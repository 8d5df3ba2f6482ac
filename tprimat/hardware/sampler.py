"""Sample power, clock, temperature and throttling of GPUs: for the telemetry of a run, and while a probe is timed.

NVIDIA GPUs are read in this process through NVML, AMD GPUs through amd-smi. Sampling never disturbs a run: any
problem ends the samples and is reported in one notice at the end of the run.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

from tprimat.core.errors import RecordError
from tprimat.hardware.gpus import Gpu, amd_smi_cards, nested, number, open_nvml, query_nvml, tool_output
from tprimat.records.schema import TelemetrySample
from tprimat.records.store import RunDirectory

STOP_SECONDS = 4.0
"""For the sampling to end with the run; a driver that does not answer blocks it."""
PERIOD_SECONDS = 1.0
AMD_PERIOD_SECONDS = 2.0
"""amd-smi is a Python program that takes a good part of a second of one core each time."""
NVIDIA_REASONS = {
    0x02: "application clocks",
    0x04: "power cap",
    0x08: "hw slowdown",
    0x10: "sync boost",
    0x20: "thermal (driver)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons (NVML API reference, nvmlClocksEventReasons). Idle (0x1) and a display's
clocks (0x100) are not throttling."""
AMD_REASONS = {
    "prochot_violation_status": "processor hot",
    "ppt_violation_status": "power cap",
    "socket_thermal_violation_status": "thermal (socket)",
    "vr_thermal_violation_status": "thermal (voltage regulator)",
    "hbm_thermal_violation_status": "thermal (memory)",
}
"""Keys of `amd-smi metric --throttle` on MI300 and later; ppt is package power tracking."""


class NvmlReader:
    """Read NVIDIA GPUs through NVML: a few system calls each, no process."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """Open the library and find the GPUs.

        Raises:
            LookupError: NVML does not answer, or does not know one of the GPUs.
        """
        self._nvml = open_nvml()
        try:
            self._devices = [self._nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        except self._nvml.NVMLError as error:
            raise LookupError(f"NVML: {error}") from error

    def read(self, at_seconds: float = 0.0) -> list[TelemetrySample]:
        """Read all GPUs now, each numbered by its place."""
        return [self._read(place, device, at_seconds) for place, device in enumerate(self._devices)]

    def _read(self, place: int, device: Any, at_seconds: float) -> TelemetrySample:
        def query(function: str, *arguments: Any) -> Any:
            return query_nvml(self._nvml, function, device, *arguments)

        rates, reasons = query("nvmlDeviceGetUtilizationRates"), query("nvmlDeviceGetCurrentClocksEventReasons") or 0
        return TelemetrySample(
            at_seconds=at_seconds,
            gpu=place,
            power_watts=number(query("nvmlDeviceGetPowerUsage"), 1e-3),
            clock_hertz=number(query("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM), 1e6),
            temperature_celsius=number(query("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU)),
            utilization=None if rates is None else rates.gpu / 100,
            throttle_reasons=tuple(word for bit, word in NVIDIA_REASONS.items() if reasons & bit),
        )


def amd_smi_samples(text: str | None, at_seconds: float = 0.0) -> list[TelemetrySample]:
    """Parse the output of `amd-smi metric --json`; the GPUs have amd-smi's numbers."""
    return [
        TelemetrySample(
            at_seconds=at_seconds,
            gpu=card["gpu"],
            power_watts=number(nested(card, "power", "socket_power", "value")),
            clock_hertz=number(nested(card, "clock", "gfx_0", "clk", "value"), 1e6),
            temperature_celsius=number(nested(card, "temperature", "hotspot", "value")),
            utilization=number(nested(card, "usage", "gfx_activity", "value"), 1e-2),
            throttle_reasons=tuple(
                word for key, word in AMD_REASONS.items() if nested(card, "throttle", key) in {"ACTIVE", True}
            ),
        )
        for card in amd_smi_cards(text)
    ]


def has_values(sample: TelemetrySample) -> bool:
    """Return whether anything was measured."""
    return any(
        value is not None for value in (sample.power_watts, sample.clock_hertz, sample.temperature_celsius, sample.utilization)
    )


AMD_COMMAND = ("amd-smi", "metric", "--power", "--clock", "--temperature", "--usage", "--json")
"""With --throttle in releases that know it."""


@contextmanager
def telemetry(
    directory: RunDirectory, started_at: str | None, gpus: Sequence[Gpu], on_notice: Callable[[str], None]
) -> Iterator[None]:
    """Append samples of a run's GPUs to telemetry.jsonl inside a `with` block.

    Args:
        directory: the run's folder.
        started_at: of the run's record, ISO 8601; sample times count from it. Without it, nothing happens.
        gpus: in the order of the local ranks; with none, nothing happens.
        on_notice: called at most once, on leaving, with the reason for missing samples.
    """
    if started_at is None or not gpus:
        yield
        return
    offset = time.time() - datetime.fromisoformat(started_at).timestamp() - time.monotonic()
    stopping, problem = threading.Event(), ""

    def work() -> None:
        nonlocal problem
        try:
            for sample in _samples(gpus, stopping, offset):
                if has_values(sample):
                    directory.append_telemetry(sample)
            problem = "" if stopping.is_set() else "amd-smi does not answer"
        except LookupError as error:
            problem = str(error)
        except RecordError as error:
            problem = error.what.removesuffix(".")

    thread = threading.Thread(target=work, name="telemetry", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(STOP_SECONDS)  # a daemon ends with the launcher
        if problem:
            on_notice(f"No telemetry of the GPUs: {problem}.")


def _samples(gpus: Sequence[Gpu], stopping: threading.Event, offset: float) -> Iterator[TelemetrySample]:
    """Yield samples until the end of the run, or until no command of AMD's works; `offset` is that of our clock."""

    def now() -> float:
        return round(offset + time.monotonic(), 3)

    if gpus[0].platform == "cuda":
        reader = NvmlReader([gpu.uuid for gpu in gpus if gpu.uuid])
        yield from reader.read(now())
        while not stopping.wait(PERIOD_SECONDS):
            yield from reader.read(now())
        return
    ranks = {gpu.index: rank for rank, gpu in enumerate(gpus)}
    for command in ((*AMD_COMMAND, "--throttle"), AMD_COMMAND):
        while samples := amd_smi_samples(tool_output(command), now()):
            yield from (replace(sample, gpu=ranks[sample.gpu]) for sample in samples if sample.gpu in ranks)
            if stopping.wait(AMD_PERIOD_SECONDS):
                return
