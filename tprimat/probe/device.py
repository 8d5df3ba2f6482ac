"""The device under test: what it is called, what it runs, and how large its cache is."""

from pathlib import Path

import torch

from tprimat.records.environment import processor_name, software_versions
from tprimat.records.schema import Machine

INFINITY_CACHE_BYTES = 256 * 2**20
"""Memory-side cache of MI300 and MI350 (AMD CDNA 3 white paper, page 4), which torch does not report."""


SMALLEST_GPU_FLUSH_BYTES = 128 * 2**20
"""Half of what Triton's do_bench overwrites; never less, so that writing it hides the host's launch."""


CACHE_WHEN_UNKNOWN = 32 * 2**20


def default_device() -> torch.device:
    """The first GPU where there is one, else the processor."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache."""
    if device.type == "cuda":
        known = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
        beside = INFINITY_CACHE_BYTES if torch.version.hip else 0
        return max(known, beside, SMALLEST_GPU_FLUSH_BYTES)
    sizes = [text_of(path) for path in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))]
    kibibytes = [int(size[:-1]) for size in sizes if size and size.endswith("K") and size[:-1].isdigit()]
    return max(kibibytes) * 1024 if kibibytes else CACHE_WHEN_UNKNOWN


def describe_machine(device: torch.device, ranks: int = 1, seen: Machine | None = None) -> Machine:
    """The hardware as torch names it.

    Args:
        device: what is measured.
        ranks: processes that take part in the measurement.
        seen: what the vendor's tool says of this machine; torch knows neither the driver nor the power limit.
    """
    if device.type != "cuda":
        return Machine(platform="cpu", accelerator=processor_name(), gpus_per_node=ranks, nodes=1)
    return Machine(
        platform="rocm" if torch.version.hip else "cuda",
        accelerator=torch.cuda.get_device_name(device),
        gpus_per_node=ranks,
        nodes=1,
        memory_bytes=int(torch.cuda.get_device_properties(device).total_memory),
        power_limit_watts=seen.power_limit_watts if seen else None,
        driver=seen.driver if seen else None,
    )


def describe_software() -> dict[str, str]:
    """Versions that decide which kernels run, by the names that runs use, so that both can be compared."""
    installed = software_versions()
    found = {name: version for name, version in installed.items() if name in {"torch", "triton"}}
    for name, version in (("cuda", torch.version.cuda), ("rocm", torch.version.hip)):
        if version:
            found[name] = str(version)
    if torch.cuda.is_available():
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        if cudnn:
            found["cudnn"] = str(cudnn)
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return found


def text_of(path: Path) -> str | None:
    """A small system file, or None."""
    try:
        return path.read_text(encoding="utf8").strip() or None
    except OSError:
        return None


def number(text: str | None) -> float | None:
    """A figure that a tool printed, or None for its '[N/A]'."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def smi_command(device: torch.device, *names: str) -> list[str]:
    """The nvidia-smi that prints these fields of this very device, found by its UUID whatever CUDA_VISIBLE_DEVICES says."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = [f"--id=GPU-{uuid}"] if uuid else []
    return ["nvidia-smi", *which, f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]


def visible_gpus() -> int:
    """GPUs of this machine that torch may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def is_rank() -> bool:
    """Whether torchrun started this process."""
    return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
