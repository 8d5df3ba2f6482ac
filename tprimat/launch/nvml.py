"""Readings through NVIDIA's Python package (nvidia-ml-py, imported as pynvml): no process, a few system calls each."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from tprimat.launch.gpus import Gpu
from tprimat.launch.readings import Reading, nvidia_reasons, times


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
