"""What a machine offers besides software (GPUs, shared memory, disk, SLURM), and what to do about it."""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tprimat.hardware.gpus import Gpu, open_nvml, query_nvml, visible_gpus
from tprimat.hardware.nodes import expand_hosts

GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_MEMORY_BYTES = ENOUGH_DISK_BYTES = GIB
"""NCCL and the data loaders take some hundred MiB on eight GPUs; records and logs of some hundred runs, and a trace, as much."""
MAX_LINKS = 18
"""NVLinks of one GPU (H100, H200, B200)."""


Status = Literal["ok", "absent", "problem"]
"""absent: not there, and not needed by every run."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    finding: str
    fix: str | None = None
    """What to do, where something should be done."""


def machine_checks(output: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Look at everything but the software; `output` is where results would go."""
    gpus = visible_gpus(environment)
    yield check_gpus(gpus)
    if len(gpus) > 1 and gpus[0].platform == "cuda":
        try:
            yield check_links(open_nvml(), gpus)
        except LookupError as error:
            yield Check("NVLink", "absent", str(error))
    yield check_shared_memory(SHARED_MEMORY)
    yield check_disk(output)
    yield check_slurm(environment)


def check_gpus(gpus: tuple[Gpu, ...]) -> Check:
    """Name the GPUs that a run would see."""
    if not gpus:
        fix = "if there are GPUs, nvidia-smi or amd-smi must list them; containers need --gpus all or --device /dev/kfd"
        return Check("GPUs", "absent", "none: runs show that a strategy works, not how fast it is", fix)
    names = list(dict.fromkeys(gpu.name or "unnamed" for gpu in gpus))
    finding = f"{len(gpus)} x {' + '.join(names)}"
    if gpus[0].memory_bytes:
        finding += f", {gpus[0].memory_bytes / GIB:.0f} GiB"
    if gpus[0].driver:
        finding += f", driver {gpus[0].driver}"
    if len(names) > 1:
        variable = "ROCR_VISIBLE_DEVICES" if gpus[0].platform == "rocm" else "CUDA_VISIBLE_DEVICES"
        return Check("GPUs", "problem", finding, f"choose equal ones with {variable}: the slowest decides the speed of a step")
    return Check("GPUs", "ok", finding)


def check_links(nvml: Any, gpus: tuple[Gpu, ...]) -> Check:
    """Count the NVLinks of each NVIDIA GPU."""
    devices = [query_nvml(nvml, "nvmlDeviceGetHandleByUUID", gpu.uuid) for gpu in gpus]
    links = range(MAX_LINKS)
    counts = [[query_nvml(nvml, "nvmlDeviceGetNvLinkState", device, link) for link in links].count(1) for device in devices]
    if not any(counts):
        fix = "prefer strategies with little communication, such as minimal_communication"
        return Check("NVLink", "absent", "none: the GPUs exchange data over PCIe", fix)
    if len(set(counts)) > 1:
        fix = "nvidia-smi nvlink --status names the links that are down"
        return Check("NVLink", "problem", f"active links differ: {', '.join(map(str, counts))}", fix)
    return Check("NVLink", "ok", f"{counts[0]} active links on each GPU")


def check_shared_memory(place: Path) -> Check:
    """Measure /dev/shm, over which NCCL and data loaders exchange data."""
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return Check(str(place), "problem", "not there", "mount -t tmpfs tmpfs /dev/shm")
    finding = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB"
    if usage.free < ENOUGH_SHARED_MEMORY_BYTES:
        return Check(str(place), "problem", finding, "docker run --ipc=host or --shm-size=16g; or delete old files")
    return Check(str(place), "ok", finding)


def check_disk(output: Path) -> Check:
    """Look for room and permission where results would go."""
    place = next(path for path in (output.absolute(), *output.absolute().parents) if os.path.lexists(path))
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Check("disk", "problem", f"{place} is not a writable folder", "another --output-dir")
    free, room = shutil.disk_usage(place).free, "make room, or another --output-dir"
    finding = f"{free / GIB:,.0f} GiB free at {place}"
    return Check("disk", "problem", finding, room) if free < ENOUGH_DISK_BYTES else Check("disk", "ok", finding)


def check_slurm(environment: Mapping[str, str]) -> Check:
    """Say whether this is a job of SLURM."""
    if "SLURM_JOB_ID" in environment:
        nodes = len(expand_hosts(environment.get("SLURM_JOB_NODELIST", "")))
        finding = f"job {environment['SLURM_JOB_ID']} on {nodes} node{'' if nodes == 1 else 's'}"
        fix = f"srun --nodes={nodes} --ntasks={nodes} ./benchmark.py --nodes {nodes}" if nodes > 1 else None
        return Check("SLURM", "ok", finding, fix)
    if shutil.which("srun"):
        fix = "salloc or sbatch, then start ./benchmark.py in the job"
        return Check("SLURM", "absent", "not in a job; srun is installed", fix)
    return Check("SLURM", "absent", "not installed; nothing needs it")
