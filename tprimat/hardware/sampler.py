"""Sample power, clock, temperature and throttling of GPUs: for the telemetry of a run, and while a probe is timed.

NVIDIA GPUs are read in this process through NVML, AMD GPUs through amd-smi. Sampling never disturbs a run: any
problem ends the samples and is reported in one notice at the end of the run.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from types import TracebackType
from typing import Any

from tprimat.core.errors import RecordError
from tprimat.hardware.gpus import Gpu, amd_smi_cards, nested, open_nvml, query_nvml, scale, to_float, tool_output
from tprimat.records.schema import TelemetrySample
from tprimat.records.store import RunDirectory

STOP_SECONDS = 4.0
"""For the sampling to end with the run; a driver that does not answer blocks it."""
PERIOD_SECONDS = 1.0
AMD_PERIOD_SECONDS = 2.0
"""amd-smi is a Python program that takes a good part of a second of one core each time."""
NVIDIA_REASONS = {
    0x04: "power cap",
    0x08: "hw slowdown",
    0x10: "sync boost",
    0x20: "thermal (driver)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons (NVML API reference, nvmlClocksEventReasons). Idle (0x1) and clocks set by
applications or a display (0x2, 0x100) are not throttling."""
NVIDIA_REASON_FUNCTIONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
"""The same bits: the name since driver 535, and the older one."""
AMD_REASONS = {
    "prochot_violation_status": "processor hot",
    "ppt_violation_status": "power cap",
    "socket_thermal_violation_status": "thermal (socket)",
    "vr_thermal_violation_status": "thermal (voltage regulator)",
    "hbm_thermal_violation_status": "thermal (memory)",
}
"""Keys of `amd-smi metric --throttle` on MI300 and later; ppt is package power tracking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One GPU at one moment; None for a value that is not available."""

    device: str
    """UUID on NVIDIA; the tool's number of the GPU on AMD."""
    power_watts: float | None = None
    clock_hertz: float | None = None
    temperature_celsius: float | None = None
    utilization: float | None = None
    """0..1."""
    throttle_reasons: tuple[str, ...] = ()

    @property
    def has_values(self) -> bool:
        """Whether anything was measured."""
        return any(
            value is not None for value in (self.power_watts, self.clock_hertz, self.temperature_celsius, self.utilization)
        )


class NvmlReader:
    """Read NVIDIA GPUs through NVML: a few system calls each, no process."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """Open the library and find the GPUs.

        Raises:
            LookupError: NVML does not answer, or does not know one of the GPUs.
        """
        self._nvml = open_nvml()
        try:
            self._devices = [(uuid, self._nvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in uuids]
        except self._nvml.NVMLError as error:
            raise LookupError(f"NVML: {error}") from error

    def read(self) -> list[Reading]:
        """Read all GPUs now."""
        return [self._read(uuid, device) for uuid, device in self._devices]

    def _read(self, uuid: str, device: Any) -> Reading:
        power = self._query("nvmlDeviceGetPowerUsage", device)
        clock = self._query("nvmlDeviceGetClockInfo", device, self._nvml.NVML_CLOCK_SM)
        temperature = self._query("nvmlDeviceGetTemperature", device, self._nvml.NVML_TEMPERATURE_GPU)
        rates = self._query("nvmlDeviceGetUtilizationRates", device)
        reasons = (self._query(function, device) for function in NVIDIA_REASON_FUNCTIONS)
        return Reading(
            device=uuid,
            power_watts=scale(power, 1e-3),
            clock_hertz=scale(clock, 1e6),
            temperature_celsius=scale(temperature, 1.0),
            utilization=None if rates is None else rates.gpu / 100,
            throttle_reasons=nvidia_reasons(next((bits for bits in reasons if bits is not None), 0)),
        )

    def _query(self, function: str, *arguments: Any) -> Any:
        return query_nvml(self._nvml, function, *arguments)


def nvidia_reasons(bits: int) -> tuple[str, ...]:
    """Name the reasons for throttling that are set in NVML's bits."""
    return tuple(word for bit, word in NVIDIA_REASONS.items() if bits & bit)


def amd_smi_readings(text: str | None) -> list[Reading]:
    """Parse the output of `amd-smi metric --json`."""
    return [
        Reading(
            device=str(card["gpu"]),
            power_watts=to_float(nested(card, "power", "socket_power", "value")),
            clock_hertz=scale(to_float(nested(card, "clock", "gfx_0", "clk", "value")), 1e6),
            temperature_celsius=to_float(nested(card, "temperature", "hotspot", "value")),
            utilization=scale(to_float(nested(card, "usage", "gfx_activity", "value")), 1e-2),
            throttle_reasons=tuple(
                word for key, word in AMD_REASONS.items() if nested(card, "throttle", key) in {"ACTIVE", True}
            ),
        )
        for card in amd_smi_cards(text)
    ]


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
        self._ranks = {device_of(gpu): rank for rank, gpu in enumerate(gpus)}
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
            for reading in self._amd() if self._gpus[0].platform == "rocm" else self._nvidia():
                rank = self._ranks.get(reading.device)
                if rank is not None and reading.has_values:
                    self._directory.append_telemetry(sample(reading, rank, offset + time.monotonic()))
                    self._problem = None  # an earlier command failed, this one works
        except RecordError as error:
            self._problem = error.what.removesuffix(".")
            return
        if not self._stopping.is_set():
            self._problem = self._problem or "amd-smi does not answer"

    def _nvidia(self) -> Iterator[Reading]:
        try:
            reader = NvmlReader([gpu.uuid for gpu in self._gpus if gpu.uuid])
        except LookupError as error:
            self._problem = str(error)
            return
        yield from reader.read()
        while not self._stopping.wait(PERIOD_SECONDS):
            yield from reader.read()

    def _amd(self) -> Iterator[Reading]:
        for command in ((*AMD_COMMAND, "--throttle"), AMD_COMMAND):
            while readings := amd_smi_readings(tool_output(command)):
                yield from readings
                if self._stopping.wait(AMD_PERIOD_SECONDS):
                    return


def device_of(gpu: Gpu) -> str:
    """Return the name that readings use for a GPU."""
    return (gpu.uuid if gpu.platform == "cuda" else None) or str(gpu.index)


def sample(reading: Reading, rank: int, at_seconds: float) -> TelemetrySample:
    """Convert a reading to a record."""
    values = asdict(reading)
    del values["device"]
    return TelemetrySample(at_seconds=round(at_seconds, 3), gpu=rank, **values)
