"""Describe the device under test: its name, software, cache size, and its clock and power while it works."""

from collections.abc import Callable
from statistics import fmean

import torch

from tprimat.hardware.gpus import NvmlReader
from tprimat.hardware.nodes import this_machine
from tprimat.records.environment import processor_name, software_versions
from tprimat.records.schema import Machine, TelemetrySample

INFINITY_CACHE_BYTES = 256 * 2**20
"""Memory-side cache of MI300 and MI350 (AMD CDNA 3 white paper, page 4), which torch does not report."""
MIN_GPU_CACHE_BYTES = 128 * 2**20
"""Half of what Triton's do_bench overwrites; never less, so that overwriting it hides the host's launch overhead."""


def default_device() -> torch.device:
    """Return the first GPU if there is one, else the processor."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def visible_gpus() -> int:
    """Return the number of GPUs that torch may use."""
    return torch.cuda.device_count()


def is_rank() -> bool:
    """Return whether torchrun started this process."""
    return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()


def cache_bytes(device: torch.device) -> int:
    """Return the size of a GPU's last-level cache; a processor's is not displaced."""
    if device.type != "cuda":
        return 0
    l2 = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    return max(l2, INFINITY_CACHE_BYTES if torch.version.hip else 0, MIN_GPU_CACHE_BYTES)


def describe_machine(device: torch.device, ranks: int = 1) -> Machine:
    """Describe the hardware as torch names it, and what only its vendor's tool knows: driver and power limit."""
    if device.type != "cuda":
        return Machine(platform="cpu", accelerator=processor_name(), gpus_per_node=ranks, nodes=1)
    detected = this_machine()
    return Machine(
        platform="rocm" if torch.version.hip else "cuda",
        accelerator=torch.cuda.get_device_name(device),
        gpus_per_node=ranks,
        nodes=1,
        memory_bytes=int(torch.cuda.get_device_properties(device).total_memory),
        power_limit_watts=detected.power_limit_watts if detected else None,
        driver=detected.driver if detected else None,
    )


def describe_software() -> dict[str, str]:
    """Return the versions that decide which kernels run, under the names that runs use, so that both can be compared."""
    versions = {name: version for name, version in software_versions().items() if name in {"torch", "triton"}}
    for name, version in (("cuda", torch.version.cuda), ("rocm", torch.version.hip)):
        if version:
            versions[name] = str(version)
    if torch.cuda.is_available():
        if cudnn := torch.backends.cudnn.version():  # type: ignore[no-untyped-call]
            versions["cudnn"] = str(cudnn)
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return versions


class Gauges:
    """Average the clock and power that `look` reads between `start` and `take`, to recognise a throttled measurement."""

    def __init__(self, device: torch.device) -> None:
        self._read = reader_of(device)
        self._readings: list[TelemetrySample] = []

    def start(self) -> None:
        """Discard earlier readings."""
        self._readings.clear()

    def look(self) -> None:
        """Read clock and power now, where they can be read."""
        self._readings += self._read()

    def take(self) -> tuple[float | None, float | None]:
        """Return the means since `start`, Hz and W, and start again; None where nothing was read."""
        clock, power = (
            [value for reading in self._readings if (value := getattr(reading, name)) is not None]
            for name in ("clock_hertz", "power_watts")
        )
        self._readings.clear()
        return (fmean(clock) if clock else None, fmean(power) if power else None)


def reader_of(device: torch.device) -> Callable[[], list[TelemetrySample]]:
    """Return a function that reads an NVIDIA GPU through NVML, whatever CUDA_VISIBLE_DEVICES says."""
    if device.type != "cuda" or torch.version.hip:
        return list
    try:
        return NvmlReader([f"GPU-{torch.cuda.get_device_properties(device).uuid}"]).read
    except LookupError:  # NVML does not answer, or does not know the GPU
        return list
