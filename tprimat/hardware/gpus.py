"""List the GPUs of this machine, and sample their power, clock, temperature and throttling: no torch and no CUDA context.

NVIDIA GPUs are read in this process through NVML, AMD GPUs through amd-smi.
"""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from typing import Any

from tprimat.core import units
from tprimat.core.accelerators import Backend
from tprimat.core.errors import RecordError
from tprimat.core.rows import DATA, document
from tprimat.records.schema import TelemetrySample
from tprimat.records.store import RunDirectory

TOOL_TIMEOUT_SECONDS = 10.0
"""For a tool that has to wake the driver first; usually it answers at once."""
UNIT_BYTES = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
"""amd-smi writes MB for powers of two."""
AMD_LIMITS = (("ppt0", "socket_power_limit", "value"), ("socket_power", "value"))
"""Where amd-smi's `limit` holds the cap in force: since ROCm 7.2, and before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as its vendor's library or tool describes it."""

    platform: Backend
    name: str | None
    index: int | None = None
    """The vendor's number of the GPU, whatever the run can see."""
    uuid: str | None = None
    memory_bytes: int | None = None
    power_limit_watts: float | None = None
    driver: str | None = None


def visible_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that a framework started with this environment would see."""
    gpus = nvidia_gpus()
    if gpus:
        return select(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    gpus = amd_gpus()
    # ROCR selects first, below HIP, which then counts what remains. HIP reads CUDA's variable if its own is absent.
    gpus = select(gpus, environment.get("ROCR_VISIBLE_DEVICES"))
    return select(gpus, environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES")))


def select(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """Apply a *_VISIBLE_DEVICES variable of indices or UUID prefixes; the first invalid entry ends the list, as in CUDA."""
    if visible is None:
        return tuple(gpus)
    selected: list[Gpu] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.startswith("MIG-"):  # a slice: name and memory of the whole GPU do not apply
            selected.append(Gpu(platform="cuda", name=None, uuid=word, driver=gpus[0].driver if gpus else None))
            continue
        if word.isdigit():
            matches = gpus[int(word) : int(word) + 1]
        else:
            matches = [gpu for gpu in gpus if word.startswith("GPU-") and (gpu.uuid or "").startswith(word)]
        if not matches:
            break
        selected.append(matches[0])
    return tuple(selected)


def open_nvml() -> Any:
    """Return NVIDIA's management library, initialized. Raises LookupError: it is not installed, or there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError as error:
        raise LookupError("the Python package nvidia-ml-py is not installed") from error
    except pynvml.NVMLError as error:
        raise LookupError(f"NVML: {error}") from error
    return pynvml


def query_nvml(nvml: Any, function: str, *arguments: Any) -> Any:
    """Call an NVML function; return None where the GPU, the driver or the package does not support it."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def nvidia_gpus() -> tuple[Gpu, ...]:
    """List GPUs through NVML, without those that this process may not open."""
    try:
        nvml = open_nvml()
    except LookupError:
        return ()
    driver = query_nvml(nvml, "nvmlSystemGetDriverVersion")
    count = query_nvml(nvml, "nvmlDeviceGetCount") or 0
    devices = (query_nvml(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(count))
    return tuple(
        Gpu(
            platform="cuda",
            name=query_nvml(nvml, "nvmlDeviceGetName", device),
            index=index,
            uuid=query_nvml(nvml, "nvmlDeviceGetUUID", device),
            memory_bytes=getattr(query_nvml(nvml, "nvmlDeviceGetMemoryInfo", device), "total", None),
            power_limit_watts=number(query_nvml(nvml, "nvmlDeviceGetPowerManagementLimit", device), 1e-3),
            driver=driver,
        )
        for index, device in enumerate(device for device in devices if device is not None)
    )


LEAST_BYTES_IN_USE = 1 << 30
"""An idle notebook or a monitor holds less."""


def users_of(gpus: Iterable[Gpu]) -> list[str]:
    """Name the programs that compute on NVIDIA GPUs and hold much of their memory; none where the driver does not say."""
    try:
        nvml = open_nvml()
    except LookupError:
        return []
    users = []
    for index in (gpu.index for gpu in gpus if gpu.index is not None):
        device = query_nvml(nvml, "nvmlDeviceGetHandleByIndex", index)
        processes = query_nvml(nvml, "nvmlDeviceGetComputeRunningProcesses", device) or ()
        large = [one for one in processes if one.usedGpuMemory is None or one.usedGpuMemory >= LEAST_BYTES_IN_USE]
        users += [f"GPU {index} by process {one.pid} ({units.gibibytes(one.usedGpuMemory)})" for one in large]
    return users


def amd_gpus() -> tuple[Gpu, ...]:
    """List GPUs through amd-smi, in the form of ROCm 7.2 or of those before."""
    return tuple(
        Gpu(
            platform="rocm",
            name=nested(card, "asic", "market_name"),
            index=card["gpu"],
            memory_bytes=to_bytes(nested(card, "vram", "size")),
            power_limit_watts=next((watts for keys in AMD_LIMITS if (watts := number(nested(card, "limit", *keys)))), None),
            driver=nested(card, "driver", "version"),
        )
        for card in amd_smi_cards(tool_output(["amd-smi", "static", "--asic", "--vram", "--driver", "--limit", "--json"]))
    )


def amd_smi_cards(text: str | None) -> list[dict[str, Any]]:
    """Return what amd-smi says of each GPU, after any warnings; newer releases put the list under gpu_data."""
    lines = (text or "").splitlines()
    start = next((index for index, line in enumerate(lines) if line.lstrip()[:1] in {"{", "["}), len(lines))
    try:
        document = json.loads("\n".join(lines[start:]))
    except ValueError:
        return []
    cards = document.get("gpu_data") if isinstance(document, dict) else document
    return [card for card in cards or () if isinstance(card, dict) and isinstance(card.get("gpu"), int)]


def tool_output(argv: Sequence[str]) -> str | None:
    """Return what a tool prints; None if it is missing, fails, or does not answer."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TOOL_TIMEOUT_SECONDS, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def nested(value: Any, *keys: str) -> Any:
    """Look up a value in nested dicts; None if a key is missing or the tool says N/A."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return None if value == "N/A" else value


def number(value: Any, factor: float = 1.0) -> float | None:
    """Convert a tool's number to another unit; None for N/A and the like."""
    try:
        return float(value) * factor
    except (TypeError, ValueError):
        return None


def to_bytes(size: Any) -> int | None:
    """Convert a tool's number with its unit."""
    value = number(nested(size, "value"), UNIT_BYTES.get(str(nested(size, "unit")), 1))
    return None if value is None else round(value)


# Samples: the telemetry of a run, and what a probe was timed under. A problem ends them, and is told at the end of the run.

STOP_SECONDS = 4.0
"""For the sampling to end with the run; a driver that does not answer blocks it."""
PERIOD_SECONDS = 1.0
AMD_PERIOD_SECONDS = 2.0
"""amd-smi is a Python program that takes a good part of a second of one core each time."""
REASONS = cache(lambda vendor: document(DATA / "throttling.yaml")[vendor])
"""Vendor -> what its driver names, such as a bit -> why a GPU is slowed down, in words."""


class NvmlReader:
    """Read NVIDIA GPUs through NVML: a few system calls each, no process."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """Open the library and find the GPUs."""
        self._nvml = open_nvml()
        try:
            self._devices = [self._nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        except self._nvml.NVMLError as error:  # a GPU that it does not know
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
            throttle_reasons=tuple(word for bit, word in REASONS("nvidia").items() if reasons & bit),
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
                word for key, word in REASONS("amd").items() if nested(card, "throttle", key) in {"ACTIVE", True}
            ),
        )
        for card in amd_smi_cards(text)
    ]


def has_values(sample: TelemetrySample) -> bool:
    """Return whether anything was measured."""
    values = (sample.power_watts, sample.clock_hertz, sample.temperature_celsius, sample.utilization)
    return any(value is not None for value in values)


AMD_COMMAND = ("amd-smi", "metric", "--power", "--clock", "--temperature", "--usage", "--json")
"""With --throttle in releases that know it."""


@contextmanager
def telemetry(
    directory: RunDirectory, started_at: str | None, gpus: Sequence[Gpu], on_notice: Callable[[str], None]
) -> Iterator[None]:
    """Append samples of a run's GPUs, in the order of its local ranks, to telemetry.jsonl inside a `with` block.

    Their times count from `started_at`, ISO 8601; without it, or without GPUs, nothing happens. `on_notice` is
    called at most once, on leaving, with the reason for missing samples.
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
