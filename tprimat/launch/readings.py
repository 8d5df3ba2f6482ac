"""What the vendors' tools say of GPUs at work, as readings. Pure: text or documents in, readings out."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tprimat.launch.gpus import document, number, within

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
