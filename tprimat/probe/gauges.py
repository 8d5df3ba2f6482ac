"""Clock and power draw of a device while it works, recorded beside what was timed: a throttled rate must be recognisable."""

import atexit
import contextlib
import importlib
import os
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

import torch

from tprimat.probe.device import number, smi_command

PERIOD_MILLISECONDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the device said at one moment."""

    clock_hertz: float | None
    power_watts: float | None


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that are there."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class Gauges:
    """Readings between `start` and `take`.

    torch.cuda.clock_rate and power_draw answer at once where the Python package of NVML or amd-smi is installed; they are
    asked while a batch of repetitions is under way. Elsewhere on an NVIDIA GPU one nvidia-smi prints a line every 100 ms
    for as long as this process lives. Where neither is there, nothing is read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._readings: list[Reading] = []
        self._lock = threading.Lock()
        self._tool: subprocess.Popen[bytes] | None = None
        self._refusals: tuple[type[Exception], ...] = (
            ImportError,
            RuntimeError,
            AttributeError,
            OSError,
            TypeError,
            KeyError,
            *smi_errors(),
        )
        self._torch_answers = device.type == "cuda" and self._ask_torch() is not None
        if device.type == "cuda" and not self._torch_answers and not torch.version.hip:
            self.follow([*smi_command(device, "clocks.sm", "power.draw"), f"--loop-ms={PERIOD_MILLISECONDS}"])

    def start(self) -> None:
        """Forget what was read before."""
        with self._lock:
            self._readings.clear()

    def look(self) -> None:
        """Read now, where that is quick."""
        reading = self._ask_torch() if self._torch_answers else None
        if reading:
            with self._lock:
                self._readings.append(reading)

    def take(self) -> Reading:
        """Mean of the readings since `start`."""
        with self._lock:
            readings = list(self._readings)
            self._readings.clear()
        return Reading(
            clock_hertz=mean([reading.clock_hertz for reading in readings]),
            power_watts=mean([reading.power_watts for reading in readings]),
        )

    def _ask_torch(self) -> Reading | None:
        watts = 1.0 if torch.version.hip else 1e-3
        """amd-smi answers in watts, NVML in milliwatts; torch passes both on as they are (torch/cuda/__init__.py, power_draw)."""
        try:
            return Reading(
                clock_hertz=torch.cuda.clock_rate(self.device) * 1e6, power_watts=torch.cuda.power_draw(self.device) * watts
            )
        except self._refusals:
            return None

    def follow(self, command: Sequence[str]) -> None:
        """Read lines of 'clock in MHz, power in W' from a tool until it ends or is closed; nothing where it is not installed.

        It writes to a terminal of its own: into a pipe, a program may hold its lines back until it has written thousands.
        """
        reading, writing = os.openpty()
        try:
            tool = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writing, stderr=subprocess.DEVNULL)
        except OSError:
            os.close(reading)
            return
        finally:
            os.close(writing)
        self._tool = tool
        atexit.register(self.close)
        lines = os.fdopen(reading, encoding="utf8", errors="replace")
        threading.Thread(target=self._read_lines, args=(lines,), daemon=True).start()

    def close(self) -> None:
        """End the tool that was followed."""
        if self._tool:
            self._tool.kill()
            self._tool.wait()
            self._tool = None

    def _read_lines(self, lines: TextIO) -> None:
        with contextlib.suppress(OSError):  # what a terminal answers once the writer has ended
            for line in lines:
                self._keep(line)

    def _keep(self, line: str) -> None:
        cells = [number(cell.strip()) for cell in line.split(",")]
        if len(cells) == 2:
            clock = None if cells[0] is None else cells[0] * 1e6
            with self._lock:
                self._readings.append(Reading(clock_hertz=clock, power_watts=cells[1]))


def smi_errors() -> list[type[Exception]]:
    """What the vendors' packages raise when the driver refuses; they derive from Exception alone."""
    found = (error_of(module, name) for module, name in (("pynvml", "NVMLError"), ("amdsmi", "AmdSmiException")))
    return [error for error in found if error]


def error_of(module: str, name: str) -> type[Exception] | None:
    """An exception of a package that may be missing, or broken without its driver."""
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError, KeyError):
        return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None
