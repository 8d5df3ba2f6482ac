"""Look at everything that a run needs, before one fails for lack of it."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tprimat.core.accelerators import PLATFORM_OF
from tprimat.core.rows import DATA, document
from tprimat.engines import ENGINE_NAMES, FALLBACK
from tprimat.engines.base import INSTALL, Here, engine_named
from tprimat.hardware.gpus import Gpu, open_nvml, query_nvml, visible_gpus
from tprimat.hardware.nodes import expand_hosts, this_machine
from tprimat.records.environment import package_version

TORCH_PROGRAM = """
import json, torch
cuda = torch.cuda.is_available()
nccl = torch.cuda.nccl.version() if cuda and torch.distributed.is_nccl_available() else None
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
                  "devices": torch.cuda.device_count() if cuda else 0, "nccl": nccl}))
"""
IMPORT_SECONDS = 120.0
"""For a first import from a network file system."""
TRAINING = (("Megatron-Core", ("megatron-core",)), ("Lightning", ("pytorch-lightning", "lightning")))
"""What the embedded engine needs besides torch: name, and the packages of which it needs one."""
CUDA_LIBRARIES = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
STACK = ("torch", "megatron-core", "megatron-bridge", "nemo-toolkit", "transformer-engine", "torchtitan", *CUDA_LIBRARIES)
CONTAINER = {"NVIDIA_PYTORCH_VERSION": "nvcr.io/nvidia/pytorch", "CUBLAS_VERSION": "cuBLAS", "NCCL_VERSION": "NCCL"}
"""Variables that NVIDIA's containers set, whose libraries are no packages of pip -> of what they are the version."""


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


def examine(output: Path, primus_path: str | None = None) -> tuple[list[Check], bool]:
    """Look at software and machine; return the checks as a reader wants them, and whether some engine can train here."""
    machine = this_machine()
    python = Check("Python", "ok", f"{platform.python_version()} at {sys.executable}")
    torch = check_torch(ask_torch(), machine.platform if machine else None)
    found = {name: next(filter(None, map(package_version, distributions)), None) for name, distributions in TRAINING}
    packages = [
        Check(name, "ok", one) if one else Check(name, "problem", "not installed", INSTALL) for name, one in found.items()
    ]
    here = Here(platform=PLATFORM_OF[machine.platform] if machine else "cpu", primus_path=primus_path)
    engines = list(check_engines(here))
    embedded = all(check.status == "ok" for check in (torch, *packages)) and engines[0].name != f"engine {FALLBACK}"
    checks = [python, torch, *packages, check_stack(), *engines, *machine_checks(output)]
    return checks, embedded or any(engine.status == "ok" for engine in engines)


def ask_torch() -> Mapping[str, Any] | str:
    """Return what torch says of itself, imported in another process; or one line about what went wrong."""
    if find_spec("torch") is None:
        return "not installed"
    try:
        command = [sys.executable, "-c", TORCH_PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False, errors="replace")
    except subprocess.TimeoutExpired:
        return f"not imported within {IMPORT_SECONDS:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
    answer: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def check_torch(answer: Mapping[str, Any] | str, gpus: str | None) -> Check:
    """Say for what torch is built, and whether it sees the GPUs."""
    if isinstance(answer, str):
        return Check("torch", "problem", answer, INSTALL)
    built = "rocm" if answer["hip"] else "cuda" if answer["cuda"] else None
    build = {"rocm": f"ROCm {answer['hip']}", "cuda": f"CUDA {answer['cuda']}", None: "CPUs"}[built]
    library = f", {'RCCL' if answer['hip'] else 'NCCL'} {'.'.join(map(str, answer['nccl']))}" if answer["nccl"] else ""
    finding = f"{answer['version']}, built for {build}{library}"
    if gpus and built != gpus:
        fix = f"{sys.executable} -m pip uninstall torch, then make install" + (" TORCH=rocm7.2" if gpus == "rocm" else "")
        return Check("torch", "problem", f"{finding}, but the GPUs need {gpus}", fix)
    if gpus and not answer["devices"]:
        fix = "nvidia-smi or rocm-smi shows the driver's version; a driver older than torch's build must be updated"
        return Check("torch", "problem", f"{finding}, which does not see the GPUs", fix)
    return Check("torch", "ok", finding + (f", sees {answer['devices']} GPUs" if gpus else ""))


def check_stack() -> Check:
    """Name the installed packages that trainings run on, and the known set of versions that they are."""
    installed = {name: version for name in STACK if (version := package_version(name)) is not None}
    container = {name: os.environ[variable] for variable, name in CONTAINER.items() if variable in os.environ}
    finding = ", ".join(f"{name} {version}" for name, version in {**container, **installed}.items()) or "nothing installed"
    short = {name: ".".join(version.split(".")[:2]) for name, version in installed.items()}
    for stack in document(DATA / "stacks.yaml")["stacks"]:
        if stack["versions"].items() <= short.items():
            return Check("stack", "ok", f"{finding}; the versions of {stack['name']}")
    unknown = f"{finding}; not a set of versions known to TPrimat" if installed else finding
    return Check("stack", "absent", unknown, "docs/engines.md lists known ones under Versions")


def check_engines(here: Here) -> Iterator[Check]:
    """Ask every engine whether it can start; nothing of the embedded one, which needs no framework of its own, if it can."""
    for engine in map(engine_named, ENGINE_NAMES):
        answer = engine.available(here)
        answer = (engine.untried() or answer) if isinstance(answer, str) else answer
        if not isinstance(answer, str):
            yield Check(f"engine {engine.name}", "absent", answer.what.removesuffix("."), answer.fix)
        elif engine.name != FALLBACK:
            yield Check(f"engine {engine.name}", "ok", answer)


# What the machine offers besides software.

GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_MEMORY_BYTES = ENOUGH_DISK_BYTES = GIB
"""NCCL and data loaders take some hundred MiB on eight GPUs, where Docker gives 64; records of some hundred runs, as much."""
MAX_LINKS = 18
"""NVLinks of one GPU (H100, H200, B200)."""


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
