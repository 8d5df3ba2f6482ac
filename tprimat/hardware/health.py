"""What a machine offers a training besides software (GPUs, shared memory, disk, SLURM), and what to do about it."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tprimat.hardware.gpus import Gpu, open_nvml, query_nvml, visible_gpus
from tprimat.hardware.nodes import expand_hosts

GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_MEMORY_BYTES = GIB
"""NCCL and the data loaders take some hundred MiB of it on eight GPUs; Docker gives a container 64 MiB."""
ENOUGH_DISK_BYTES = GIB
"""Records and logs of some hundred runs, and a trace."""
UNCORRECTED, SINCE_BOOT = 1, 0
"""NVML's kinds of ECC errors and of counters."""
MAX_LINKS = 18
"""NVLinks of one GPU (H100, H200, B200)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Literal["ok", "absent", "problem"]
    """absent: not there, and not needed by every run."""
    finding: str
    fix: str | None = None
    """What to do, where something should be done."""


def machine_checks(output: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Look at everything but the software; `output` is where results would go."""
    gpus = visible_gpus(environment)
    yield check_gpus(gpus)
    if len(gpus) > 1 and gpus[0].platform == "cuda":
        yield check_links(gpus)
    if gpus and gpus[0].platform == "cuda":
        yield check_errors(gpus)
    yield check_shared_memory(SHARED_MEMORY)
    yield check_disk(output)
    yield check_slurm(environment)


def check_gpus(gpus: tuple[Gpu, ...]) -> Check:
    """Name the GPUs that a run would see."""
    if not gpus:
        fix = "if there are GPUs: nvidia-smi or amd-smi must list them, in a container with --gpus all or --device /dev/kfd"
        return Check(name="GPUs", status="absent", finding="none: runs show that a strategy works, not how fast it is", fix=fix)
    names = list(dict.fromkeys(gpu.name or "unnamed" for gpu in gpus))
    parts = [f"{len(gpus)} x {' + '.join(names)}"]
    if gpus[0].memory_bytes:
        parts.append(f"{gpus[0].memory_bytes / GIB:.0f} GiB")
    if gpus[0].driver:
        parts.append(f"driver {gpus[0].driver}")
    if len(names) > 1:
        variable = "ROCR_VISIBLE_DEVICES" if gpus[0].platform == "rocm" else "CUDA_VISIBLE_DEVICES"
        fix = f"choose equal ones with {variable}: the slowest decides the speed of a step"
        return Check(name="GPUs", status="problem", finding=", ".join(parts), fix=fix)
    return Check(name="GPUs", status="ok", finding=", ".join(parts))


def check_links(gpus: tuple[Gpu, ...]) -> Check:
    """Count the NVLinks of each NVIDIA GPU."""
    try:
        nvml = open_nvml()
    except LookupError as error:
        return Check(name="NVLink", status="absent", finding=str(error))
    links = [
        [query_nvml(nvml, "nvmlDeviceGetNvLinkState", device, link) for link in range(MAX_LINKS)]
        for _, device in devices_of(nvml, gpus)
    ]
    counts = [sum(state == 1 for state in states) for states in links]
    if not any(counts):
        fix = "prefer strategies with little communication, such as minimal_communication"
        return Check(name="NVLink", status="absent", finding="none: the GPUs exchange data over PCIe", fix=fix)
    if len(set(counts)) > 1:
        fix = "nvidia-smi nvlink --status names the links that are down"
        return Check(name="NVLink", status="problem", finding=f"active links differ: {', '.join(map(str, counts))}", fix=fix)
    return Check(name="NVLink", status="ok", finding=f"{counts[0]} active links on each GPU")


def check_errors(gpus: tuple[Gpu, ...]) -> Check:
    """Look at each NVIDIA GPU for memory errors that could not be corrected."""
    try:
        errors = gpu_errors(gpus)
    except LookupError as error:
        return Check(name="GPU errors", status="absent", finding=str(error))
    if errors:
        fix = "nvidia-smi -q -d ECC,ROW_REMAPPER; reset the GPU or leave it out"
        return Check(name="GPU errors", status="problem", finding="; ".join(errors), fix=fix)
    return Check(name="GPU errors", status="ok", finding="no uncorrected memory errors reported")


def gpu_errors(gpus: tuple[Gpu, ...]) -> list[str]:
    """Return a sentence on each memory error of these GPUs, since the driver was loaded.

    Raises:
        LookupError: NVML cannot be asked.
    """
    nvml, errors = open_nvml(), []
    for gpu, device in devices_of(nvml, gpus):
        if count := query_nvml(nvml, "nvmlDeviceGetTotalEccErrors", device, UNCORRECTED, SINCE_BOOT):
            errors.append(f"GPU {gpu.index}: {count} uncorrected memory errors since the driver was loaded")
        _, _, pending, failed = query_nvml(nvml, "nvmlDeviceGetRemappedRows", device) or (0, 0, 0, 0)
        if failed:
            errors.append(f"GPU {gpu.index}: a faulty row of its memory could not be replaced")
        elif pending:
            errors.append(f"GPU {gpu.index}: a faulty row of its memory is replaced at the next reset")
    return errors


def devices_of(nvml: Any, gpus: Iterable[Gpu]) -> list[tuple[Gpu, Any]]:
    """Return NVML's handle of each GPU that it knows."""
    pairs = ((gpu, query_nvml(nvml, "nvmlDeviceGetHandleByUUID", gpu.uuid)) for gpu in gpus if gpu.uuid is not None)
    return [(gpu, device) for gpu, device in pairs if device is not None]


def check_shared_memory(place: Path) -> Check:
    """Measure /dev/shm, over which NCCL and data loaders exchange data."""
    name = str(place)
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return Check(name=name, status="problem", finding="not there", fix="mount -t tmpfs tmpfs /dev/shm")
    finding = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB"
    if usage.free < ENOUGH_SHARED_MEMORY_BYTES:
        return Check(
            name=name, status="problem", finding=finding, fix="docker run --ipc=host or --shm-size=16g; or delete old files"
        )
    return Check(name=name, status="ok", finding=finding)


def check_disk(output: Path) -> Check:
    """Look for room and permission where results would go."""
    place = next(path for path in (output.absolute(), *output.absolute().parents) if os.path.lexists(path))
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Check(name="disk", status="problem", finding=f"{place} is no folder to write to", fix="another --output-dir")
    free = shutil.disk_usage(place).free
    finding = f"{free / GIB:,.0f} GiB free at {place}"
    if free < ENOUGH_DISK_BYTES:
        return Check(name="disk", status="problem", finding=finding, fix="make room, or another --output-dir")
    return Check(name="disk", status="ok", finding=finding)


def check_slurm(environment: Mapping[str, str]) -> Check:
    """Say whether this is a job of SLURM."""
    if "SLURM_JOB_ID" in environment:
        nodes = expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))
        finding = f"job {environment['SLURM_JOB_ID']} on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"
        fix = f"srun --nodes={len(nodes)} --ntasks={len(nodes)} ./benchmark.py --nodes {len(nodes)}" if len(nodes) > 1 else None
        return Check(name="SLURM", status="ok", finding=finding, fix=fix)
    if shutil.which("srun"):
        fix = "salloc or sbatch, then start ./benchmark.py in the job"
        return Check(name="SLURM", status="absent", finding="not in a job; srun is installed", fix=fix)
    return Check(name="SLURM", status="absent", finding="not installed; nothing needs it")
