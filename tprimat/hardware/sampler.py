"""What the vendors' tools say of GPUs at work, as readings. Pure: text or documents in, readings out."""

import csv
import importlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any

from tprimat.errors import RecordError
from tprimat.hardware.gpus import Gpu, document, number, within
from tprimat.hardware.line_subprocess import SECONDS_TO_DIE, Tool
from tprimat.records.schema import TelemetrySample
from tprimat.records.store import RunDirectory

NVIDIA_FIELDS = ("uuid", "power.draw", "clocks.sm", "temperature.gpu", "utilization.gpu")
NVIDIA_REASONS = {
    0x04: "power cap",
    0x08: "hw slowdown",
    0x10: "sync boost",
    0x20: "thermal (driver)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons (NVML API reference, nvmlClocksEventReasons). Idle (0x1) and the clocks that
applications or a display asked for (0x2, 0x100) hold nothing back."""
AMD_REASONS = {
    "prochot_violation_status": "processor hot",
    "ppt_violation_status": "power cap",
    "socket_thermal_violation_status": "thermal (socket)",
    "vr_thermal_violation_status": "thermal (voltage regulator)",
    "hbm_thermal_violation_status": "thermal (memory)",
}
"""Keys of `amd-smi metric --throttle`, which MI300 and later answer; ppt is package power tracking."""
ROCM_POWER = ("current socket graphics package power (w)", "average graphics package power (w)")
ROCM_TEMPERATURE = ("temperature (sensor junction) (c)", "temperature (sensor edge) (c)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One GPU at one moment; None for what the tool does not tell."""

    device: str
    """UUID on NVIDIA; on AMD the tool's own number of the GPU."""
    power_watts: float | None = None
    clock_hertz: float | None = None
    temperature_celsius: float | None = None
    utilization: float | None = None
    """0..1."""
    throttle_reasons: tuple[str, ...] = ()

    @property
    def says_something(self) -> bool:
        """Whether anything was measured."""
        return any(
            value is not None for value in (self.power_watts, self.clock_hertz, self.temperature_celsius, self.utilization)
        )


def nvidia_row(line: str) -> Reading | None:
    """A line of nvidia-smi: NVIDIA_FIELDS, and the mask of reasons where it was asked for. None for any other text."""
    cells = [cell.strip() for row in csv.reader([line]) for cell in row]
    if len(cells) < len(NVIDIA_FIELDS) or not cells[0].startswith(("GPU-", "MIG-")):
        return None
    power, clock, temperature, utilization = map(number, cells[1:5])
    return Reading(
        device=cells[0],
        power_watts=power,
        clock_hertz=times(clock, 1e6),
        temperature_celsius=temperature,
        utilization=times(utilization, 1e-2),
        throttle_reasons=nvidia_reasons(mask(cells[5])) if len(cells) > 5 else (),
    )


def nvidia_reasons(bits: int) -> tuple[str, ...]:
    """Why clocks are held back, in words."""
    return tuple(word for bit, word in NVIDIA_REASONS.items() if bits & bit)


def mask(text: str) -> int:
    """0x0000000000000004 -> 4; 0 for [N/A]."""
    try:
        return int(text, 16)
    except ValueError:
        return 0


def amd_smi_readings(text: str) -> Iterator[Reading]:
    """The answer of `amd-smi metric --json`; newer releases put the list under gpu_data."""
    found = document(text, (dict, list))
    for card in found.get("gpu_data", []) if isinstance(found, dict) else found:
        if isinstance(card, dict) and "gpu" in card:
            yield Reading(
                device=str(card["gpu"]),
                power_watts=number(within(card, "power", "socket_power", "value")),
                clock_hertz=times(number(within(card, "clock", "gfx_0", "clk", "value")), 1e6),
                temperature_celsius=number(within(card, "temperature", "hotspot", "value")),
                utilization=times(number(within(card, "usage", "gfx_activity", "value")), 1e-2),
                throttle_reasons=tuple(
                    word for key, word in AMD_REASONS.items() if within(card, "throttle", key) in {"ACTIVE", True}
                ),
            )


def rocm_smi_readings(text: str) -> Iterator[Reading]:
    """The answer of rocm-smi --json: one object a card, numbers as text, the clock as '(2100Mhz)'."""
    for name, card in document(text, dict).items():
        if name.startswith("card") and isinstance(card, dict):
            values = {key.lower(): value for key, value in card.items()}
            clock = str(values.get("sclk clock speed:", "")).strip("()").lower().removesuffix("mhz")
            yield Reading(
                device=name.removeprefix("card"),
                power_watts=first_number(values, ROCM_POWER),
                clock_hertz=times(number(clock), 1e6),
                temperature_celsius=first_number(values, ROCM_TEMPERATURE),
                utilization=times(number(values.get("gpu use (%)")), 1e-2),
            )


def first_number(values: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    """Of the first key that has one."""
    return next((value for key in keys if (value := number(values.get(key))) is not None), None)


def times(value: float | None, factor: float) -> float | None:
    """In another unit."""
    return None if value is None else value * factor


# Readings through NVIDIA's Python package (nvidia-ml-py, imported as pynvml): no process, a few system calls each.


class Nvml:
    """The library, opened."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        """Open it and find the GPUs.

        Raises:
            ImportError: it is not installed.
            LookupError: the driver does not answer, or does not know one of the GPUs.
        """
        self._library: Any = importlib.import_module("pynvml")
        try:
            self._library.nvmlInit()
            self._handles = [(gpu.uuid, self._library.nvmlDeviceGetHandleByUUID(gpu.uuid)) for gpu in gpus if gpu.uuid]
        except self._library.NVMLError as error:
            raise LookupError(f"NVML: {error}") from error
        reasons = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        self._reasons = next((name for name in reasons if hasattr(self._library, name)), reasons[0])

    def read(self) -> Iterator[Reading]:
        """All GPUs now."""
        for uuid, handle in self._handles:
            rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
            yield Reading(
                device=uuid,
                power_watts=times(self._ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
                clock_hertz=times(self._ask("nvmlDeviceGetClockInfo", handle, self._library.NVML_CLOCK_SM), 1e6),
                temperature_celsius=times(self._ask("nvmlDeviceGetTemperature", handle, self._library.NVML_TEMPERATURE_GPU), 1.0),
                utilization=None if rates is None else rates.gpu / 100,
                throttle_reasons=nvidia_reasons(self._ask(self._reasons, handle) or 0),
            )

    def _ask(self, name: str, *arguments: Any) -> Any:
        """A number; None where this GPU or this driver does not tell."""
        try:
            return getattr(self._library, name)(*arguments)
        except (self._library.NVMLError, AttributeError):
            return None


# Power, clock, temperature and throttling of the GPUs while a run is under way, about once a second.
#
# It never disturbs a run: whatever goes wrong ends the readings, and is said in one notice when the run has ended.

PERIOD_SECONDS = 1.0
POLL_SECONDS = 2.0
"""Between two starts of AMD's tools, which are Python programs and take a good part of a second of one core each."""
NVIDIA_REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active", None)
"""The same mask: its name since driver 535, its old name, and without it."""
AMD_COMMANDS: tuple[tuple[str, Callable[[str], Iterator[Reading]]], ...] = (
    ("amd-smi metric --power --clock --temperature --usage --throttle --json", amd_smi_readings),
    ("amd-smi metric --power --clock --temperature --usage --json", amd_smi_readings),
    ("rocm-smi --showpower --showgpuclocks --showtemp --showuse --json", rocm_smi_readings),
)


class Telemetry:
    """Readings of a run's GPUs, between entering and leaving it.

    Args:
        directory: where telemetry.jsonl is appended to.
        started_at: of the run's record, ISO 8601.
        gpus: in the order of the local ranks; none: nothing is done at all.
        on_notice: told once, by the thread that leaves, why readings are missing.
    """

    def __init__(
        self, directory: RunDirectory, started_at: str | None, gpus: Sequence[Gpu], on_notice: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._gpus = gpus
        self._ranks = {name_of(gpu): rank for rank, gpu in enumerate(gpus)}
        self._on_notice = on_notice
        self._tool = Tool()
        self._trouble: str | None = None
        began = None if started_at is None else datetime.fromisoformat(started_at).timestamp()
        self._offset = None if began is None else time.time() - began - time.monotonic()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Telemetry":
        if self._gpus and self._offset is not None:
            self._thread = threading.Thread(target=self._work, args=(self._offset,), name="telemetry", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._tool.stop()
        if self._thread is None:
            return
        self._thread.join(2 * SECONDS_TO_DIE)  # a driver that does not answer keeps it; it ends with the launcher then
        if self._trouble is not None:
            self._on_notice(f"no telemetry of the GPUs: {self._trouble}")

    def _work(self, offset: float) -> None:
        try:
            for reading in self._readings():
                rank = self._ranks.get(reading.device)
                if rank is not None and reading.says_something:
                    self._directory.append_telemetry(sample(reading, rank, offset + time.monotonic()))
                    self._trouble = None  # one way of asking failed, this one works
        except RecordError as error:
            self._trouble = error.what
            self._tool.stop()
            return
        if not self._tool.stopping.is_set():
            self._trouble = self._trouble or "the tool that reads them has ended."

    def _readings(self) -> Iterator[Reading]:
        return self._of_amd() if self._gpus[0].platform == "rocm" else self._of_nvidia()

    def _of_nvidia(self) -> Iterator[Reading]:
        try:
            library = Nvml(self._gpus)
        except (ImportError, LookupError):  # its tool may still answer
            yield from self._of_nvidia_smi()
            return
        while not self._tool.stopping.is_set():
            yield from library.read()
            self._tool.stopping.wait(PERIOD_SECONDS)

    def _of_nvidia_smi(self) -> Iterator[Reading]:
        for reason in NVIDIA_REASON_FIELDS:
            fields = ",".join((*NVIDIA_FIELDS, *((reason,) if reason else ())))
            period = f"--loop-ms={round(PERIOD_SECONDS * 1000)}"
            command = ("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", period)
            answered, said = False, ""
            for line in self._lines(command, errors_too=True):
                reading = nvidia_row(line)
                if reading is None:
                    said = line.strip() or said
                else:
                    answered = True
                    yield reading
            self._trouble = f"nvidia-smi ended, saying: {said}" if said else self._trouble
            if answered or "not a valid field" not in said:
                return

    def _of_amd(self) -> Iterator[Reading]:
        for command, read in AMD_COMMANDS:
            answered = self._ask_amd(command, read)
            while answered:
                yield from answered
                if self._tool.stopping.wait(POLL_SECONDS):
                    return
                answered = self._ask_amd(command, read)
            if self._tool.stopping.is_set():  # the end of the run cut this answer off: no reason to ask in another way
                return

    def _ask_amd(self, command: str, read: Callable[[str], Iterable[Reading]]) -> list[Reading]:
        return list(read("\n".join(self._lines(command.split()))))

    def _lines(self, command: Sequence[str], *, errors_too: bool = False) -> Iterator[str]:
        try:
            yield from self._tool.lines(command, errors_too=errors_too)
        except OSError as error:
            self._trouble = f"{command[0]}: {error.strerror or error}."


def name_of(gpu: Gpu) -> str:
    """What a reading calls a GPU."""
    return (gpu.uuid if gpu.platform == "cuda" else None) or str(gpu.index)


def sample(reading: Reading, rank: int, at_seconds: float) -> TelemetrySample:
    """A reading as the record keeps it."""
    return TelemetrySample(
        at_seconds=round(at_seconds, 3),
        gpu=rank,
        power_watts=reading.power_watts,
        clock_hertz=reading.clock_hertz,
        temperature_celsius=reading.temperature_celsius,
        utilization=reading.utilization,
        throttle_reasons=reading.throttle_reasons,
    )
