"""Sample power, clock, temperature and throttling of GPUs: for the telemetry of a run, and while a probe is timed.

NVIDIA GPUs are read in this process through NVML, AMD GPUs through amd-smi. Sampling never disturbs a run: any
problem ends the samples and is reported in one notice at the end of the run.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from types import TracebackType
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


class Telemetry:
    """Append samples of a run's GPUs to telemetry.jsonl inside a `with` block.

    Args:
        directory: the run's folder.
        started_at: of the run's record, ISO 8601; sample times count from it.
        gpus: in the order of the local ranks; with none, nothing happens.
        on_notice: called at most once, on leaving, with the reason for missing samples.
    """

    def __init__(
        self, directory: RunDirectory, started_at: str | None, gpus: Sequence[Gpu], on_notice: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._gpus = gpus
        self._on_notice = on_notice
        self._stopping = threading.Event()
        self._problem: str | None = None
        began = None if started_at is None else datetime.fromisoformat(started_at).timestamp()
        self._offset = None if began is None else time.time() - began - time.monotonic()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Telemetry":
        if self._gpus and self._offset is not None:
            self._thread = threading.Thread(target=self._work, args=(self._offset,), name="telemetry", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stopping.set()
        if self._thread is None:
            return
        self._thread.join(STOP_SECONDS)  # a daemon ends with the launcher
        if self._problem is not None:
            self._on_notice(f"No telemetry of the GPUs: {self._problem}.")

    def _work(self, offset: float) -> None:
        try:
            for sample in self._amd(offset) if self._gpus[0].platform == "rocm" else self._nvidia(offset):
                if has_values(sample):
                    self._directory.append_telemetry(sample)
                    self._problem = None  # an earlier command failed, this one works
        except RecordError as error:
            self._problem = error.what.removesuffix(".")
            return
        if not self._stopping.is_set():
            self._problem = self._problem or "amd-smi does not answer"

    def _nvidia(self, offset: float) -> Iterator[TelemetrySample]:
        try:
            reader = NvmlReader([gpu.uuid for gpu in self._gpus if gpu.uuid])
        except LookupError as error:
            self._problem = str(error)
            return
        yield from reader.read(now(offset))
        while not self._stopping.wait(PERIOD_SECONDS):
            yield from reader.read(now(offset))

    def _amd(self, offset: float) -> Iterator[TelemetrySample]:
        ranks = {gpu.index: rank for rank, gpu in enumerate(self._gpus)}
        for command in ((*AMD_COMMAND, "--throttle"), AMD_COMMAND):
            while samples := amd_smi_samples(tool_output(command), now(offset)):
                yield from (replace(sample, gpu=ranks[sample.gpu]) for sample in samples if sample.gpu in ranks)
                if self._stopping.wait(AMD_PERIOD_SECONDS):
                    return


def now(offset: float) -> float:
    """Return the seconds since a run's start, from the offset of this process's clock."""
    return round(offset + time.monotonic(), 3)
